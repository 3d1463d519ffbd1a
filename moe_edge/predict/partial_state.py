"""SMoE's prediction: the next layer's attention and router on the partial state.

Source: SMoE, section IV.C. As soon as the shared expert and the resident experts of
layer l are computed, layer l + 1 attends and routes on that state while absent experts
travel; only top-score experts are fetched ahead, best first.
"""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import ConfigError
from moe_edge.predict.stale_gate import DevicePredictor


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
