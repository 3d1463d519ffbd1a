"""Stored weights as float32, and products that stay float32."""

import jax
import jax.numpy as jnp
from jax import lax

# Also on GPUs, where the default is TF32.
PRECISION = lax.Precision.HIGHEST


def to_float32(weight: jax.Array) -> jax.Array:
    """Stored weights as float32; uint16 holds the bits of bfloat16 values.

    Weights at lower precision decode themselves.
    """
    if not isinstance(weight, jax.Array):
        return weight.decode()
    if weight.dtype == jnp.uint16:
        # bfloat16 is the upper half of float32.
        bits = weight.astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return weight.astype(jnp.float32)


def rounded(product: jax.Array, number: jax.Array) -> jax.Array:
    """A float32 product that is rounded before anything is added to it.

    XLA joins a product and a sum into one rounding wherever one program holds both,
    over every barrier: engines whose programs are cut elsewhere would differ. It has no
    gradient.

    Args:
      number: int32 that is never negative, which no compiler can know; of a shape that
        broadcasts to the product's.
    """
    zero = jnp.minimum(number, 0)
    bits = lax.bitcast_convert_type(product, jnp.int32) ^ zero
    return lax.bitcast_convert_type(bits, jnp.float32)
