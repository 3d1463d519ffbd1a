"""Steps of a row on a GPU: one Triton kernel (Pallas) where XLA makes several.

A decode step of one sequence launches dozens of small kernels, which take longer to
launch than to run. The bits of a row do not depend on the other rows.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import native


def are_possible() -> bool:
    """Whether there may be Triton kernels: a GPU, and not asked to leave them out."""
    chosen = os.environ.get("MOE_EDGE_KERNELS")
    return jax.default_backend() == "gpu" and chosen != "xla"


def are_wanted() -> bool:
    """Whether the program that is traced is to use Triton kernels."""
    return native.is_wanted() and are_possible()


def is_interpreted() -> bool:
    """Whether NumPy stands in for a GPU: in tests."""
    return jax.default_backend() != "gpu"


def per_row(
    function: Callable[..., Sequence[jax.Array]],
    inputs: Sequence[tuple[jax.Array, Any]],
    outputs: Sequence[tuple[int, Any]],
) -> list[jax.Array]:
    """Calls a function with each row, as one kernel.

    Args:
      function: takes one array `[1, W]` for each input, W the next power of two of its
        N, and returns one for each output. It may use what Triton has: operations
        element by element, reductions along the last axis. It has no gradient.
      inputs: arrays `[T, N]`, or `[1, N]` for all rows, and what fills each up to W.
      outputs: N and dtype of each.
    Returns:
      an array `[T, N]` an output.
    """
    T, widest = (max(array.shape[axis] for array, _ in inputs) for axis in (0, 1))

    def kernel(*refs):
        row = pl.program_id(0)

        def place(ref):
            (rows, width), at = ref.shape, _columns(ref.shape[1])
            here_1W = jnp.broadcast_to(row if rows > 1 else 0, at.shape)
            return ref.at[here_1W, at], at < width

        found = []
        for ref, (_, other) in zip(refs, inputs, strict=False):
            at, is_known = place(ref)
            found.append(triton.load(at, mask=is_known, other=other))
        for ref, made in zip(refs[len(inputs) :], function(*found), strict=True):
            at, is_known = place(ref)
            triton.store(at, made, mask=is_known)

    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((T, width), dtype) for width, dtype in outputs],
        grid=(T,),
        compiler_params=triton.CompilerParams(
            num_warps=1 if widest <= 256 else 4, num_stages=1
        ),
        interpret=is_interpreted(),
        name="moe_edge_rows",
    )
    return call(*(array for array, _ in inputs))


def _columns(width: int) -> jax.Array:
    """int32 `[1, W]`."""
    return jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)[None]


def pick(choice_1W: jax.Array, values_1W: jax.Array, k: int):
    """Inside a kernel: `[1, k']` places of the k largest, best first, and their values.

    Ties go to the lower place, NaN is the largest. k' is the next power of two; what is
    beyond k is zero.
    """
    choice_1W = jnp.where(choice_1W != choice_1W, jnp.inf, choice_1W)
    at_1W, ranks_1K = _columns(choice_1W.shape[1]), _columns(k)
    places_1K = jnp.zeros(ranks_1K.shape, jnp.int32)
    found_1K = jnp.zeros(ranks_1K.shape, values_1W.dtype)
    is_free = at_1W >= 0

    def take(rank, carry):
        is_free, places_1K, found_1K = carry
        best = jnp.max(jnp.where(is_free, choice_1W, -jnp.inf), axis=1, keepdims=True)
        is_best = is_free & (choice_1W >= best)
        place = jnp.where(is_best, at_1W, choice_1W.shape[1])
        place_11 = jnp.min(place, axis=1, keepdims=True)
        is_here = at_1W == place_11
        value_11 = jnp.sum(jnp.where(is_here, values_1W, 0), axis=1, keepdims=True)
        places_1K = jnp.where(ranks_1K == rank, place_11, places_1K)
        found_1K = jnp.where(ranks_1K == rank, value_11, found_1K)
        return is_free & ~is_here, places_1K, found_1K

    return lax.fori_loop(0, k, take, (is_free, places_1K, found_1K))[1:]
