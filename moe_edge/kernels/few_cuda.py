"""Products of few rows by a CUDA kernel of our own: the rival of the Triton form.

The same plan, places and exactness (native/few.cu): a warp takes two rows of weights by
loads of 16 bytes, all under way at once up to 4 KiB a row, and one, two or four rows of
x meet them in float32. What is absent comes from the host and stays in its slot in
passing. Each is one launch on the program's own stream; nobody waits on the host.

On a CPU the same source runs with lanes as loops (native/cuda_shim.h).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native, side_calls
from moe_edge.kernels import rows as rows_kernels

MISS_WARPS = 64  # that share what comes over the link
MOST = 1 << 27  # numbers of x and of outputs: the kernel counts threads in 32 bits


@functools.cache
def open_calls() -> None:
    """Makes the call known to JAX, and on a GPU loads its kernel.

    Raises:
      ConfigError: the C++ kernels were not built, or no kernel can be had for this GPU.
    """
    library = side_calls.register("few", "MOE_EDGE_FEW_ROWS=cuda", ("product",))
    side_calls.load_cuda(library, "few")


def check(kind: str | None) -> None:
    """Opens the call.

    Args:
      kind: of experts in blocks; None: in floats.
    Raises:
      ConfigError: there is no such kernel here, or it does not take these experts.
    """
    check_weights(kind)
    if not rows_kernels.are_possible():
        raise ConfigError(
            "MOE_EDGE_FEW_ROWS is cuda, and only a GPU has its kernel (here is "
            f"{jax.default_backend()}, or MOE_EDGE_KERNELS says xla); leave it out"
        )
    open_calls()


def check_weights(kind: str | None, dtype=jnp.float32) -> None:
    """Raises ConfigError for experts that the kernel does not take."""
    if kind is not None or dtype not in (jnp.float32, jnp.bfloat16):
        raise ConfigError(
            f"MOE_EDGE_FEW_ROWS is cuda and the experts are {kind or dtype}; "
            "its kernel reads bfloat16 and float32: leave it out"
        )


def product(
    x_NI: jax.Array,
    slots_SR: jax.Array,
    rows,
    top_k: int,
    firsts: tuple[int, ...],
    biases: tuple[int | None, ...],
    shape: tuple[int, int],
    *,
    kind: str | None = None,
    combine: Callable | None = None,
    scale_P: jax.Array | None = None,
    host_ER: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One launch: rows times one matrix, or two that `combine` makes one of.

    Args:
      x_NI: float32, a row of each pair or of each token.
      slots_SR, rows, top_k, scale_P, host_ER: as of `few.ffn`.
      firsts: where each matrix begins in a record, in elements.
      biases: where theirs do; None: there is none.
      shape: of the pairs' outputs.
      kind: of records in blocks: refused.
      combine: `model.layers.activate` with its `kind` and `limit`.
    Returns:
      (float32 `shape`, arbitrary for pairs that were left out; the slots).
    Raises:
      ConfigError: experts that the kernel does not take, or rows; see `open_calls`.
    """
    check_weights(kind, slots_SR.dtype)
    if (most := max(x_NI.size, math.prod(shape))) > MOST:
        raise ConfigError(
            f"{most} numbers of few rows, and a launch takes {MOST}; give it fewer rows"
        )
    open_calls()
    activation, limit = 0, None
    if combine is not None:
        activation = native.ACTIVATIONS.index(combine.keywords["kind"])
        limit = combine.keywords.get("limit")
    several = [] if rows.row_B is None else [rows.row_B, rows.count_B, rows.pair_P]
    absent = [] if host_ER is None else [rows.host_B, host_ER]
    scale = [] if scale_P is None else [scale_P]
    given = [x_NI, slots_SR, rows.record_B, *several, *absent, *scale]
    numbers = (
        *(*firsts, -1)[:2],
        *(-1 if first is None else first for first in (*biases, None)[:2]),
        *(shape[0] // len(x_NI), activation, MISS_WARPS),
        *map(bool, (several, absent, scale)),
    )
    passed = {1} if absent else set()  # the slots, in place
    found = side_calls.call(
        "moe_edge_few_product",
        given,
        read={*range(len(given))} - passed,
        new=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        numbers=np.array(numbers, np.int64),
        limit=np.float32(limit or 0.0),
    )
    return found[0], found[1] if absent else slots_SR
