"""SMoE's eviction: the lowest mean gate score over the last steps."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import module_of, set_at
from moe_edge.core.checks import check_count
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import CacheSpec, State, mean_scores
from moe_edge.offload.evict_scores import ScoredPolicy


@register
@dataclasses.dataclass(frozen=True)
class SmoeScore(ScoredPolicy):
    """Lowest mean gate score over the last `window` steps, chosen or not.

    SMoE's shield (chosen experts stay until their layer is computed) is what every
    cache here does through `protected_S`.
    """

    window: int = 16  # n; the paper does not state its value

    name = "smoe_score"
    SOURCE = "SMoE, equation 3"

    def __post_init__(self):
        check_count("window", self.window)

    def init(self, spec: CacheSpec, xp=np) -> State:
        shape = (self.window, spec.num_layers, spec.num_experts)
        return {
            **super().init(spec, xp),
            "ring_NLE": xp.zeros(shape, dtype=np.float32),
            "seen_L": xp.zeros((spec.num_layers,), dtype=np.int32),
        }

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        spare = state["key_LE"].shape[1] - 1
        xp, seen = module_of(state["key_S"]), state["seen_L"][layer]
        row_E = mean_scores(ids_TK, scores_TE, spare)
        ring_NLE = set_at(state["ring_NLE"], (seen % self.window, layer), row_E)
        filled = xp.minimum(seen + 1, self.window).astype(np.float32)
        # Rows not yet filled are zero. A sum over all keeps rounding from piling up.
        mean_E = xp.sum(ring_NLE[:, layer], axis=0) / filled
        keys_E = state["key_LE"][layer, :spare]
        return {
            **state,
            "ring_NLE": ring_NLE,
            "seen_L": set_at(state["seen_L"], layer, seen + 1),
            "score_B": set_at(state["score_B"], keys_E, mean_E),
        }
