"""SMoE's prediction: the next layer's attention and router on the partial state.

Source: SMoE, section IV.C. As soon as the shared expert and the resident experts of
layer l are computed, layer l + 1 attends and routes on that state while absent experts
travel; only top-score experts are fetched ahead, best first.
"""

import dataclasses
from typing import ClassVar

import jax

from moe_edge.core.checks import ConfigError
from moe_edge.model.transformer import Block, Chunk
from moe_edge.predict.stale_gate import DevicePredictor, wanted_scores


def partial_gate(
    block: Block,
    x_BSD: jax.Array,
    chunk: Chunk,
    window: jax.Array,
    cache,
    top_a: float | None = None,
) -> jax.Array:
    """What layer l + 1 would choose on a partial state; pure, for use in jit.

    Args:
      block: of layer l + 1, a MoE layer, bound to its weights.
      x_BSD: float32 residual stream after layer l without its absent experts.
      chunk: positions and padding, those of layer l.
      window: of layer l + 1.
      cache: keys and values of layer l + 1 before this step. Only read: the keys of
        the partial state are dropped, so a program must not donate it.
      top_a: see `wanted_scores`; None asks for all that would be chosen.
    Returns:
      float32 [E], see `wanted_scores`.
    Raises:
      ConfigError: a dense layer, which has no router.
    """
    if not block.is_moe:
        raise ConfigError(
            "partial_gate got a dense layer, expected a MoE layer; skip dense layers"
        )
    attended_BSD, _ = block.attend(x_BSD, chunk, window, cache)
    _, routing = block.route(attended_BSD, chunk)
    return wanted_scores(routing.ids_TK, routing.scores_TE, block.router.moe, top_a)


@dataclasses.dataclass(frozen=True, eq=False)
class PartialState(DevicePredictor):
    """Predicts one layer ahead, from scores that the engine hands to `store`.

    Attributes:
      top_a: a of the expert-cache router: the margin of top-score experts. None
        fetches low-score experts ahead too.
    """

    top_a: float | None = 0.0
    name: ClassVar[str] = "smoe_partial"
    needs: ClassVar[frozenset[str]] = frozenset({"partial_state"})

    def __post_init__(self):
        if self.top_a is not None and not 0 <= self.top_a < 1:
            raise ConfigError(f"top_a must lie in [0, 1), got {self.top_a}")
