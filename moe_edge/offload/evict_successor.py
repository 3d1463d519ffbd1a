"""Ours: a block is worth its recent use and what usually follows the experts chosen."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import add_at, count_at, module_of, set_at
from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import CacheSpec, Eviction, State


@register
@dataclasses.dataclass(frozen=True)
class Successor(Eviction):
    """Lowest sum of how often a block was used lately and how often it will be.

    What is to come is learnt while running, a layer by itself: entry [i, j] of the
    successor table is how often j was used in the steps after i was, each step counting
    `discount` times the one before it. The mean over the experts just chosen is what
    their successors are worth; an expert seldom seen stands for the average. A step of
    several tokens counts as their mean. Sequences share what is learnt.

    Attributes:
      discount: of a step further ahead.
      half_life: steps after which a use counts half.
      prior: uses of the average expert that every expert begins with.
    """

    discount: float = 0.6
    half_life: float = 4.0
    prior: float = 1.0

    name = "successor"
    SOURCE = "ours, by Dayan, the successor representation (1993)"
    per_block = {"worth_B": np.float32}
    ranks = "worth_B"

    def __post_init__(self):
        if not 0 <= self.discount < 1:
            raise ConfigError(f"discount must lie in [0, 1), got {self.discount}")
        check_positive("half_life", self.half_life)
        check_positive("prior", self.prior)

    def init(self, spec: CacheSpec, xp=np) -> State:
        L, E = spec.num_layers, spec.num_experts

        def zeros(*shape):
            return xp.zeros(shape, dtype=np.float32)

        return super().init(spec, xp) | {
            "step_L": xp.full((L,), -1, dtype=np.int32),  # that runs
            "count_LX": zeros(L, E + 1),  # its uses; the last one is of padding
            "learnt_L": zeros(L),  # steps before it
            "used_LE": zeros(L, E),  # uses of a mean token, summed over these
            "recent_LE": zeros(L, E),
            "past_LE": zeros(L, E),  # discounted
            "after_LEE": zeros(L, E, E),
        }

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        xp, K = module_of(state["key_S"]), ids_TK.shape[1]
        # A step may come in several parts: what it uses is learnt when the next begins.
        begins = xp.asarray(state["step_L"][layer] != step, dtype=np.float32)
        state = self._learn(state, layer, K, begins)
        count_X = state["count_LX"][layer] * (1 - begins)
        count_X = count_at(count_X, ids_TK)
        use_E = _mean_uses(count_X, K)
        past_E, used_E = state["past_LE"][layer], state["used_LE"][layer]
        share_E = use_E / ((used_E + np.float32(self.prior)) * np.float32(K))
        steps = state["learnt_L"][layer] + 1
        mean_E = (used_E + use_E) / (steps * np.float32(1 - self.discount))
        worth_E = (
            self._recent(state, layer, use_E)
            + share_E @ state["after_LEE"][layer]
            + xp.sum(share_E * past_E) * use_E
            + xp.sum(share_E) * np.float32(self.prior) * mean_E
        )
        keys = state["key_LE"][layer, : len(worth_E)]
        return state | {
            "step_L": set_at(state["step_L"], layer, step),
            "count_LX": set_at(state["count_LX"], layer, count_X),
            "worth_B": set_at(state["worth_B"], keys, worth_E),
        }

    def _learn(self, state: State, layer, K: int, begins) -> State:
        """Takes the step that ran into account, if another one `begins` (1, else 0)."""
        use_E = _mean_uses(state["count_LX"][layer], K) * begins
        past_E = state["past_LE"][layer]
        recent_E = self._recent(state, layer, use_E)
        xp = module_of(use_E)
        # Before the first step there is nothing.
        ran = xp.where(state["step_L"][layer] >= 0, begins, 0 * begins)
        recent_E = xp.where(ran > 0, recent_E, state["recent_LE"][layer])
        discounted_E = past_E * np.float32(self.discount) + use_E
        return state | {
            "learnt_L": add_at(state["learnt_L"], layer, ran),
            "used_LE": add_at(state["used_LE"], layer, use_E),
            "after_LEE": add_at(
                state["after_LEE"], layer, past_E[:, None] * use_E[None]
            ),
            "recent_LE": set_at(state["recent_LE"], layer, recent_E),
            "past_LE": set_at(
                state["past_LE"], layer, xp.where(ran > 0, discounted_E, past_E)
            ),
        }

    def _recent(self, state: State, layer, use_E):
        decay = np.float32(0.5 ** (1 / self.half_life))
        return state["recent_LE"][layer] * decay + use_E * (1 - decay)


def _mean_uses(count_X, K: int):
    """float32 [E]: uses of a mean token, from counts of a step and its padding."""
    xp = module_of(count_X)
    total = xp.maximum(xp.sum(count_X[:-1]), np.float32(1))
    return count_X[:-1] * (np.float32(K) / total)
