"""Layers that keep a state a row in place of keys and values a position.

A state has no position: it is copied whole, and a step can advance it only once. See
`short_conv.py` and `delta_net.py`.
"""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import ConfigError, check_count

# Prefill is cut at multiples of so many positions: the same bits for every cut there.
ANCHOR = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig:
    """What such layers have in common; fields of attention that they do not have."""

    kind: ClassVar[str] = ""
    rope: ClassVar[None] = None
    windows: ClassVar[tuple] = ()
    has_state: ClassVar[bool] = True
    cache_heads: ClassVar[int] = 1

    def state_shapes(self, batch: int) -> dict[str, tuple[int, int, int]]:
        """Array name -> shape `[batch, rows, width]` of the states of a layer."""
        raise NotImplementedError

    def weight_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of the layer's weights."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig(StateConfig):
    """A gated short convolution of each channel (LFM2)."""

    kind: ClassVar[str] = "conv"

    dim: int  # channels: the model's width
    kernel: int  # positions that a product covers, its own the last

    def __post_init__(self):
        check_count("dim of a short convolution", self.dim)
        _check_kernel(self.kernel)

    def state_shapes(self, batch):
        return {"window": (batch, self.kernel - 1, self.dim)}

    def weight_shapes(self, d_model):
        return {
            "in_proj": (3 * self.dim, d_model),
            "conv": (self.dim, 1, self.kernel),
            "out_proj": (d_model, self.dim),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(StateConfig):
    """A gated delta-net (Qwen3-Next; Yang et al., arXiv 2412.06464)."""

    kind: ClassVar[str] = "delta"

    key_heads: int
    value_heads: int  # each key head serves as many consecutive ones
    key_dim: int  # width of a head of q and k
    value_dim: int
    kernel: int
    # Whether one product gives q, k, v and z, and one b and a, by key head
    # (Qwen3-Next), not one each of [q | k | v], z, b and a.
    grouped: bool = False

    def __post_init__(self):
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            check_count(f"{name} of a delta-net", getattr(self, name))
        _check_kernel(self.kernel)
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"value_heads {self.value_heads} of a delta-net must be a multiple of "
                f"its key_heads {self.key_heads}"
            )

    @property
    def channels(self) -> int:
        """Of the convolution: all heads of q, k and v."""
        keys = 2 * self.key_heads * self.key_dim
        return keys + self.value_heads * self.value_dim

    def state_shapes(self, batch):
        return {
            "state": (batch, self.value_heads * self.key_dim, self.value_dim),
            "window": (batch, self.kernel - 1, self.channels),
        }

    def weight_shapes(self, d_model):
        heads, values = self.value_heads, self.value_heads * self.value_dim
        if self.grouped:
            products = {"qkvz": self.channels + values, "ba": 2 * heads}
        else:
            products = {"qkv": self.channels, "z": values, "b": heads, "a": heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"in_{name}": (width, d_model) for name, width in products.items()
        }
        return shapes | {
            "conv": (self.channels, 1, self.kernel),
            "dt_bias": (heads,),
            "a_log": (heads,),
            "norm": (self.value_dim,),
            "out_proj": (d_model, values),
        }


def _check_kernel(kernel: int) -> None:
    if kernel < 2:
        raise ConfigError(
            "a short convolution covers two positions or more, got a kernel of "
            f"{kernel}"
        )
