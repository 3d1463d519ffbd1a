"""Small parts that every block shares: norm, activation, gated MLP, parameters.

Matrices keep Hugging Face's `[out, in]` layout. A parameter may be stored as
float32, bfloat16, or uint16 (the bits of a bfloat16, the fast storage on CPU:
see `model/matvec.py`); arithmetic is always float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.kernels import decode_attention, native, rows
from moe_edge.model.matvec import linear, linear_each
from moe_edge.model.shapes import Shapes, mlp_shapes

INIT_SCALE = 0.02


def new_matrix(rngs: nnx.Rngs, *shape: int, scale: float = INIT_SCALE) -> nnx.Param:
    """A float32 parameter drawn from a normal distribution."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


def add_params(module: nnx.Module, shapes: Shapes, rngs: nnx.Rngs) -> None:
    """Fresh parameters: matrices random, norms one, other vectors zero."""
    for name, shape in shapes.items():
        if len(shape) > 1:
            value = new_matrix(rngs, *shape)
        else:
            is_scale = name.endswith(("norm", "layer_scale", "input_scale"))
            is_scale |= name == "expert_scale"
            value = nnx.Param(jnp.full(shape, float(is_scale), jnp.float32))
        setattr(module, name, value)


def norm_scale(weight: jax.Array, plus_one: bool) -> jax.Array:
    """What multiplies a normed value: the stored weight, or one more."""
    return weight.astype(jnp.float32) + 1.0 if plus_one else weight


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    scale_D, D = weight.astype(jnp.float32), x.shape[-1]
    if x.dtype == jnp.float32 and native.suits(0, x):
        return native.norm(x.reshape(-1, D), scale_D, eps).reshape(x.shape)

    if rows.are_wanted():
        given = (x.reshape(-1, D), 0.0), (scale_D[None], 0.0)
        (y_TD,) = rows.per_row(
            lambda *row: [_norm(*row, eps, D)], given, [(D, jnp.float32)]
        )
        return y_TD.reshape(x.shape)
    return _norm(x, scale_D.reshape((1,) * (x.ndim - 1) + (-1,)), eps, D)


def norm(x: jax.Array, weight: jax.Array, bias, eps: float) -> jax.Array:
    """`rms_norm`; with a bias LayerNorm, which is that of x less its mean."""
    if bias is None:
        return rms_norm(x, weight, eps)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return add_bias(rms_norm(centred, weight, eps), bias)


def _norm(x, scale, eps: float, width: int):
    """Of a float32 row, or of one that zeros fill up from `width`."""
    variance = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / width
    return x * jax.lax.rsqrt(variance + eps) * scale


def add_norm(x: jax.Array, y: jax.Array, weight: jax.Array, eps: float):
    """`x + y` and its `rms_norm`; float32 of one shape.

    With MOE_EDGE_DECODE_ATTENTION=1 one kernel on a GPU, for as many rows as there.
    """
    D = x.shape[-1]
    if not decode_attention.suits(x.size // D, 1):
        total = x + y
        return total, rms_norm(total, weight, eps)

    def row(x, y, scale):
        total = x + y
        return total, _norm(total, scale, eps, D)

    inputs = x.reshape(-1, D), y.reshape(-1, D), weight.astype(jnp.float32)[None]
    kinds = [(D, jnp.float32)] * 2
    found = rows.per_row(row, [(each, 0.0) for each in inputs], kinds)
    return [each.reshape(x.shape) for each in found]


def add_bias(x: jax.Array, bias) -> jax.Array:
    """`x + bias` along the last axis; `bias` None leaves x as it is."""
    if bias is None:
        return x
    return x + bias[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def activate(gate: jax.Array, up: jax.Array, kind: str, limit: float | None = None):
    """Combines gate and up `[..., F]`; `kind` is one of `config_checks.ACTIVATIONS`.

    "clamped_swiglu" is gpt-oss's: both inputs clipped at `limit`, one added to up.
    """
    if kind == "silu":
        return jax.nn.silu(gate) * up
    if kind == "clamped_swiglu":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
    return jax.nn.gelu(gate, approximate=kind == "gelu_tanh") * up


class GatedMlp(nnx.Module):
    """Dense gated MLP: of dense layers and of the shared expert."""

    def __init__(self, d_model: int, dim: int, activation: str, rngs: nnx.Rngs):
        self.activation = activation
        add_params(self, mlp_shapes(d_model, dim), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Args: x `[..., D]` float32. Returns the same shape."""
        gate, up = linear_each(x, self.gate[...], self.up[...])
        return linear(activate(gate, up, self.activation), self.down[...])
