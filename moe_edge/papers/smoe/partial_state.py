"""SMoE's prediction: the next layer routes on a state that is computed in part.

Section IV.C lets layer l + 1 attend and route as soon as the shared and the resident
experts of layer l are computed, while absent experts travel. The scores come from
`device_scores`, inside programs of the engine.
"""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.predict.stale_gate import DevicePredictor


@register
@dataclasses.dataclass(frozen=True, eq=False)
class PartialState(DevicePredictor):
    """SMoE's: the next layer, from scores that the engine hands to `store`."""

    # a of the expert-cache router: the margin of top-score experts. None fetches
    # low-score experts ahead too.
    top_a: float | None = 0.0
    name: ClassVar[str] = "smoe_partial"
    SOURCE: ClassVar[str] = "SMoE, section IV.C"
    needs: ClassVar[frozenset[str]] = frozenset({"partial_state"})

    def __post_init__(self):
        if self.top_a is not None and not 0 <= self.top_a < 1:
            raise ConfigError(f"top_a must lie in [0, 1), got {self.top_a}")
