"""How keys and values stand in a cache: exact, or in fewer bytes.

  float32   as computed                                             4 bytes a value
  bfloat16  the upper half, rounded to the nearest, ties to even    2
  q8_0      blocks of 32 as of weights (`quantised.py`)             34 / 32

An array's dtype tells its type: float32; uint16, the bits, which XLA:CPU does not widen
by itself; uint8, rows of blocks. Values are rounded once, when they are written, and
whatever attends reads what is stored: engines agree in every bit at the same type.
Host kernels write the same bytes (`kernels/native/cached.inc`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.float32 import to_float32
from moe_edge.model import quantised

# Of `attention_config.CACHE_TYPES`.
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.uint16, "q8_0": jnp.uint8}


def stored(kind: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The array that holds values of this shape."""
    *lead, width = shape
    if kind == "q8_0":
        width = quantised.row_bytes(kind, width)
    return jax.ShapeDtypeStruct((*lead, width), _DTYPES[kind])


def width_of(array: jax.Array) -> int:
    """Values in a row of a stored array."""
    width = array.shape[-1]
    if array.dtype != jnp.uint8:
        return width
    return width // quantised.BLOCK_BYTES["q8_0"] * quantised.BLOCK


def decode(array: jax.Array) -> jax.Array:
    """float32 values of a stored array."""
    if array.dtype == jnp.uint8:
        return quantised.decode("q8_0", array)
    return to_float32(array)


def encode(values: jax.Array, dtype) -> jax.Array:
    """float32 values as arrays of this dtype hold them."""
    if dtype == jnp.uint16:
        return _upper_half(values)
    return _in_blocks(values) if dtype == jnp.uint8 else values


def _upper_half(values: jax.Array) -> jax.Array:
    # By whole numbers: processors' own conversions differ in what denormals become.
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could make an infinity of it
    return jnp.where(jnp.isnan(values), quiet, nearest).astype(jnp.uint16)


def _in_blocks(values: jax.Array) -> jax.Array:
    blocks = values.reshape(*values.shape[:-1], -1, quantised.BLOCK)
    # Not divided by 127, which XLA would make a product of in some programs.
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) * jnp.float32(1 / 127)
    inverse = jnp.where(scales > 0, 1.0 / scales, 0.0)
    codes = jnp.where(jnp.isfinite(scales), jnp.round(blocks * inverse), 0.0)
    codes = lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)
    halves = lax.bitcast_convert_type(scales.astype(jnp.float16), jnp.uint8)
    rows = jnp.concatenate([halves.reshape(*scales.shape[:-1], 2), codes], axis=-1)
    return rows.reshape(*values.shape[:-1], -1)
