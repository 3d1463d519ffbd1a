"""Products with stored weights: float32 arithmetic on float32 or bfloat16 storage.

bfloat16 weights are held on a CPU as uint16 bits: XLA:CPU would otherwise convert a
whole indexed array to float32 at every call. Elsewhere they are bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax


def to_float32(weight: jax.Array) -> jax.Array:
    """Stored weights as float32; uint16 holds the bits of bfloat16 values."""
    if weight.dtype == jnp.uint16:
        # bfloat16 is the upper half of float32.
        bits = weight.astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return weight.astype(jnp.float32)


def linear(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T` in float32.

    Args:
      x: float32 (..., in).
      weight_OI: (out, in); float32, bfloat16, or uint16 with bfloat16 bits.
    Returns:
      float32 (..., out).
    """
    return lax.dot_general(
        x,
        to_float32(weight_OI),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
