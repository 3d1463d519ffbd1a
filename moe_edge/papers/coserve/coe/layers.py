"""Layers of the experts' networks, and where their weights come from.

Axes: N images, H rows, W columns, C channels, O channels or numbers that come out.

A network is a function of `Weights` and images. It asks for its tensors one by one; the
order in which it asks is their order in a record. No layer normalises: a product has a
gain and a bias a channel instead, so that an image's outputs are its own alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.core.float32 import PRECISION, to_float32

Act = Callable[[jax.Array], jax.Array]


class Tensor(NamedTuple):
    """One of a record.

    Attributes:
      mean, std: of the normal distribution of fresh values.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Weights:
    """Hands out tensors, and notes which: these are zeros, to list a network's."""

    def __init__(self):
        self.tensors: list[Tensor] = []

    def take(
        self, name: str, shape: Sequence[int], std: float, mean: float = 0.0
    ) -> jax.Array:
        """The next tensor, float32."""
        tensor = Tensor(name, tuple(shape), mean, std)
        self.tensors.append(tensor)
        return self._take(tensor)

    def _take(self, tensor: Tensor) -> jax.Array:
        return jnp.zeros(tensor.shape)


class RecordWeights(Weights):
    """Those of a record, as its words: float32, or uint16 that hold bfloat16 bits.

    Tensors are cut before they are widened: else all of a record would be copied at
    four bytes an element before anything is computed.
    """

    def __init__(self, words_W: jax.Array):
        super().__init__()
        self._words_W, self._next = words_W, 0

    def _take(self, tensor: Tensor) -> jax.Array:
        first, self._next = self._next, self._next + tensor.size
        part = lax.slice(self._words_W, (first,), (self._next,))
        return to_float32(part).reshape(tensor.shape)


class NamedWeights(Weights):
    """Those of a dict by name: what training differentiates with respect to."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        super().__init__()
        self._arrays = arrays

    def _take(self, tensor: Tensor) -> jax.Array:
        return self._arrays[tensor.name]


def convolution(x_NHWC: jax.Array, kernel_HWCO: jax.Array, stride: int) -> jax.Array:
    """A convolution; zeros all round keep H and W, but for the stride."""
    pad = (kernel_HWCO.shape[0] - 1) // 2
    return lax.conv_general_dilated(
        x_NHWC,
        kernel_HWCO,
        (stride, stride),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=PRECISION,
    )


def conv(
    w: Weights,
    name: str,
    x_NHWC: jax.Array,
    out: int,
    size: int = 3,
    stride: int = 1,
    act: Act | None = None,
    gain: float = 1.0,
) -> jax.Array:
    """A convolution with a gain and a bias a channel.

    Args:
      out: channels; size: of the kernel's sides.
      gain: that fresh weights have.
    """
    fan_in = size * size * x_NHWC.shape[-1]
    shape = (size, size, x_NHWC.shape[-1], out)
    kernel_HWCO = w.take(f"{name}.kernel", shape, math.sqrt(2 / fan_in))
    y_NHWC = convolution(x_NHWC, kernel_HWCO, stride)
    gain_O = w.take(f"{name}.gain", (out,), 0.0, gain)
    y_NHWC = y_NHWC * gain_O[None, None, None] + _bias(w, name, out)[None, None, None]
    return y_NHWC if act is None else act(y_NHWC)


def linear(w: Weights, name: str, x_NC: jax.Array, out: int) -> jax.Array:
    """A product and a bias."""
    C = x_NC.shape[-1]
    kernel_CO = w.take(f"{name}.kernel", (C, out), math.sqrt(1 / C))
    return jnp.dot(x_NC, kernel_CO, precision=PRECISION) + _bias(w, name, out)[None]


def plain_conv(w: Weights, name: str, x_NHWC: jax.Array, out: int) -> jax.Array:
    """A 1 x 1 convolution with a bias and no gain, as at the end of a detector."""
    N, H, W, C = x_NHWC.shape
    return linear(w, name, x_NHWC.reshape(-1, C), out).reshape(N, H, W, out)


def max_pool(x_NHWC: jax.Array, size: int, stride: int) -> jax.Array:
    """The largest of `size` x `size`, `size` odd; what is outside counts as nothing."""
    pad = size // 2
    return lax.reduce_window(
        x_NHWC,
        -jnp.inf,
        lax.max,
        (1, size, size, 1),
        (1, stride, stride, 1),
        ((0, 0), (pad, pad), (pad, pad), (0, 0)),
    )


def halve(x_NHWC: jax.Array) -> jax.Array:
    """Means of 2 x 2."""
    N, H, W, C = x_NHWC.shape
    return x_NHWC.reshape(N, H // 2, 2, W // 2, 2, C).mean(axis=(2, 4))


def _bias(w: Weights, name: str, out: int) -> jax.Array:
    return w.take(f"{name}.bias", (out,), 0.0)
