"""Short causal convolutions of each channel, and LFM2's gated layer of one.

The state of a layer is what the next position's window needs of earlier ones: the last
`kernel - 1` inputs. Padding stands behind a row's tokens and enters no window.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_edge.core.float32 import to_float32
from moe_edge.model.config import ModelConfig
from moe_edge.model.layers import add_params
from moe_edge.model.matvec import linear


def causal_conv(x_BSC, weight_C1L, window_BNC, valid_BS):
    """A convolution of every channel over its latest L positions.

    Args:
      x_BSC: float32.
      weight_C1L: the last weight is that of a position's own input.
      window_BNC: float32, the N = L - 1 inputs before the first.
      valid_BS: bool, False for padding, which is behind all tokens of a row.
    Returns:
      (float32 `[B, S, C]`, the window behind each row's last token: the same bits as
      before where a row has none).
    """
    S, N = x_BSC.shape[1], window_BNC.shape[1]
    inputs = jnp.concatenate([window_BNC, x_BSC], axis=1)
    weights = to_float32(weight_C1L).reshape(x_BSC.shape[2], N + 1)
    y_BSC = weights[:, 0].reshape(1, 1, -1) * inputs[:, :S]
    for tap in range(1, N + 1):
        y_BSC += weights[:, tap].reshape(1, 1, -1) * inputs[:, tap : tap + S]
    end_B = jnp.sum(valid_BS, axis=1, dtype=jnp.int32)
    rows_BN = end_B[:, None] + jnp.arange(N, dtype=jnp.int32).reshape(1, -1)
    return y_BSC, jnp.take_along_axis(inputs, rows_BN[..., None], axis=1)


class ShortConv(nnx.Module):
    """out_proj(C * conv(B * x)), where in_proj gives B, C and x (LFM2)."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.config = config.attention_of(layer)
        add_params(self, self.config.weight_shapes(config.d_model), rngs)

    def __call__(self, x_BSD, valid_BS, cache=None):
        """Runs the layer.

        Args:
          x_BSD: float32, normed input.
          valid_BS: bool, False for padding and rows at rest.
          cache: the layer's states, or None: each row begins here.
        Returns:
          (float32 `[B, S, D]`, the states behind each row's last token, or None).
        """
        before, after, x = jnp.split(linear(x_BSD, self.in_proj[...]), 3, axis=-1)
        window = begun(self.config, x_BSD.shape[0], cache)["window"]
        given = before * x, self.conv[...], window, valid_BS
        y_BSD, window = causal_conv(*given)
        y_BSD = linear(after * y_BSD, self.out_proj[...])
        return y_BSD, None if cache is None else {"window": window}


def begun(config, batch: int, cache) -> dict[str, jax.Array]:
    """A layer's states: those of the cache, or of rows that begin here."""
    if cache is not None:
        return cache
    shapes = config.state_shapes(batch)
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
