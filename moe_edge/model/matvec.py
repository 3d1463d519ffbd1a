"""Products with stored weights: float32 arithmetic on float32 or bfloat16 storage.

bfloat16 weights are held on a CPU as uint16 bits: XLA:CPU would otherwise convert a
whole indexed array to float32 at every call.

Decoding reads every weight once, so it must run at the speed of memory. A dot makes
XLA:CPU write the converted weights to memory first, and its reduce over the last
axis is slow; `lane_product` is a chain of multiply-adds over slices that XLA fuses
with the slicing and the conversion into one parallel loop of vector instructions.
Measured (2 cores, 8192 x 768 uint16): dot 7 GB/s, lanes 22-26, a C kernel 26.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.float32 import PRECISION, to_float32
from moe_edge.kernels import blocks, gradients, grouped, native

MAX_TERMS = 48  # of the chain of adds: the program grows with it
MIN_LANES = 16  # floats in a vector register
MAX_LANE_ROWS = 8  # rows of x above which a dot on converted weights is faster


def compiler_options() -> dict[str, object] | None:
    """`jax.jit(f, compiler_options=...)` for programs that use these kernels."""
    # 512-bit vectors where the processor has them: 8-30 % faster.
    on_cpu = jax.default_backend() == "cpu"
    return {"xla_cpu_prefer_vector_width": 512} if on_cpu else None


def dot(x_TI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T` of float32 arrays, at full precision on GPUs too."""
    contract = (((x_TI.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x_TI, weight_OI, contract, precision=PRECISION)


def einsum(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """`jnp.einsum` of float32 arrays, at full precision on GPUs too."""
    return jnp.einsum(subscripts, *arrays, precision=PRECISION)


def num_lanes(width: int) -> int | None:
    """Lanes for a row of `width` weights; None if `lane_product` does not suit it."""
    lanes = MIN_LANES
    while width % (2 * lanes) == 0 and width // lanes > MAX_TERMS // 2:
        lanes *= 2
    suits = width % lanes == 0 and 1 < width // lanes <= 2 * MAX_TERMS
    return lanes if suits else None


def lane_product(
    x_I: jax.Array,
    columns: Callable[[int, int], jax.Array],
    lanes: int,
    scale_O1: jax.Array | None = None,
) -> jax.Array:
    """`weight @ x` for one vector, as a chain of adds over `lanes` columns each.

    Args:
      x_I: float32 (in,), in a multiple of lanes.
      columns: (first, count) -> stored weights (out, count) of these columns. A
        slice of an argument of the program, so that it fuses.
      lanes: see `num_lanes`.
      scale_O1: factors of the rows. Here they join the loop: a multiplication of its
        own would cost as much as the product of a small expert.
    Returns:
      float32 (out,).
    """
    # Else XLA may compute x again for every weight.
    x_I = lax.optimization_barrier(x_I)
    sums_ON = None
    for first in range(0, x_I.shape[0], lanes):
        x_1N = x_I[None, first : first + lanes]
        product_ON = to_float32(columns(first, lanes)) * x_1N
        sums_ON = product_ON if sums_ON is None else sums_ON + product_ON
    if scale_O1 is not None:
        sums_ON = sums_ON * scale_O1
    # A dot with ones and not a sum, which XLA would fuse with the chain, badly.
    return dot(jnp.ones((1, lanes), jnp.float32), sums_ON)[0]


def linear(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T` in float32.

    Args:
      x: float32 (..., in).
      weight_OI: (out, in); float32, bfloat16, uint16 with bfloat16 bits, or
        `packed.Packed`, of which `Blocks` are for native kernels, too.
    Returns:
      float32 (..., out).
    """
    num_out, width = weight_OI.shape
    x_TI = x.reshape(-1, width)
    rows, lanes = x_TI.shape[0], num_lanes(width)
    stored, is_trained = _as_stored(weight_OI), _is_trained(weight_OI)
    if _is_native(rows, weight_OI):
        y_TO = native.linear(x_TI, stored, int8=_rounds(weight_OI))[0]
    elif blocks.suits_product(rows, stored, width) and not is_trained:
        y_TO = blocks.product(x_TI, stored)
    elif not isinstance(weight_OI, jax.Array):
        y_TO = weight_OI.product(x_TI)
    elif gradients.suits(width, dtype=weight_OI.dtype):
        y_TO = gradients.product(x_TI, weight_OI)
    elif (
        weight_OI.dtype == jnp.uint16
        and rows <= MAX_LANE_ROWS
        and lanes
        and jax.default_backend() == "cpu"
    ):

        def columns(first, count):
            return weight_OI[:, first : first + count]

        y_TO = jnp.stack([lane_product(x_I, columns, lanes) for x_I in x_TI])
    elif weight_OI.dtype == jnp.bfloat16 and grouped.suits(weight_OI):
        y_TO = _narrow_product(x_TI, weight_OI)
    else:
        y_TO = dot(x_TI, to_float32(weight_OI))
    return y_TO.reshape(*x.shape[:-1], num_out)


def _narrow_product(x_TI, weight_OI):
    """On a GPU: without bfloat16 weights in float32, which a dot writes to memory.

    A single row is not rounded: it meets the weights without a matrix product.
    """
    if x_TI.shape[0] == 1:
        return jnp.sum(to_float32(weight_OI) * x_TI, axis=1)[None]
    rows = grouped.split(x_TI, weight_OI.dtype, grouped.num_parts())
    contract = (((1,), (1,)), ((), ()))
    products = lax.dot_general(
        jnp.concatenate(rows), weight_OI, contract, preferred_element_type=jnp.float32
    )
    return sum(jnp.split(products, len(rows)))


def linear_each(x: jax.Array, *weights) -> list[jax.Array]:
    """`linear` of x with each of some weights of one width, with the same bits.

    Where native kernels multiply few rows it is one call: handing a product to the team
    takes as long as a small one itself.
    """
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if not all(_is_native(rows, each) for each in weights):
        return [linear(x, each) for each in weights]
    stored, int8 = map(_as_stored, weights), any(map(_rounds, weights))
    products = native.linear(x.reshape(rows, width), *stored, int8=int8)
    return [y_TO.reshape(*x.shape[:-1], y_TO.shape[1]) for y_TO in products]


def _is_native(rows: int, weight_OI) -> bool:
    """Whether `linear` multiplies so many rows by `native.linear`."""
    stored = _as_stored(weight_OI)
    width = weight_OI.shape[1]
    is_few = _rounds(weight_OI) or not blocks.suits_product(rows, stored, width)
    return is_few and native.suits(rows, stored) and not _is_trained(weight_OI)


def _rounds(weight_OI) -> bool:
    """Whether it meets few vectors rounded to 8 bits."""
    return getattr(weight_OI, "int8", False)


def _as_stored(weight_OI):
    """What native kernels take of a weight: rows of blocks are an array of bytes."""
    return getattr(weight_OI, "in_blocks", weight_OI)


def _is_trained(weight_OI) -> bool:
    return gradients.suits(weight_OI.shape[1], dtype=weight_OI.dtype)
