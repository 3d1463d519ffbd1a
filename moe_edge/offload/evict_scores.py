"""Eviction by gate scores: HybriMoE's decayed score.

Such a policy rates every expert that was scored, not only the chosen ones. `scores_TE`
must not be negative; a step of several tokens counts once, with the mean of their
scores.
"""

import dataclasses

import numpy as np

from moe_edge.core.arrays import module_of, set_at
from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import Eviction, State, mean_scores


class ScoredPolicy(Eviction):
    """Gives up the block with the lowest score in `score_B`."""

    needs = frozenset({"ids", "scores"})
    per_block = {"score_B": np.float32}
    ranks = "score_B"


@register
@dataclasses.dataclass(frozen=True)
class HybriMoe(ScoredPolicy):
    """Lowest decayed score S <- mix * TopP(p) + (1 - mix) * S, with P = 2 * top_k.

    TopP keeps the P largest scores of the step and sets the others to zero.
    """

    mix: float = 0.5

    name = "hybrimoe"
    SOURCE = "HybriMoE, arXiv 2504.05897, score-aware caching"

    def __post_init__(self):
        if not 0 < self.mix <= 1:
            raise ConfigError(f"mix must lie in (0, 1], got {self.mix}")

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        spare = state["key_LE"].shape[1] - 1
        xp = module_of(state["key_S"])
        row_E = mean_scores(ids_TK, scores_TE, spare)
        bound = xp.sort(row_E)[spare - min(2 * ids_TK.shape[1], spare)]
        best_E = xp.where(row_E >= bound, row_E, 0)
        keys_E = state["key_LE"][layer, :spare]
        mix = np.float32(self.mix)
        score_E = mix * best_E + (np.float32(1) - mix) * state["score_B"][keys_E]
        return {**state, "score_B": set_at(state["score_B"], keys_E, score_E)}
