"""Ours: a block is worth its recent use and what usually follows the experts chosen."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import add_at, count_at, module_of, set_at
from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.offload.evict_base import CacheSpec, EvictionPolicy, State


@dataclasses.dataclass(frozen=True)
class Successor(EvictionPolicy):
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
            "steps_L": zeros(L),
            "used_LE": zeros(L, E),  # mean uses of a token, summed over steps
            "recent_LE": zeros(L, E),
            "before_LE": zeros(L, E),  # the step before
            "past_LE": zeros(L, E),  # steps before, discounted
            "after_LEE": zeros(L, E, E),
        }

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        xp = module_of(state["key_S"])
        E = state["key_LE"].shape[1] - 1
        counts_X = count_at(xp.zeros(E + 1, dtype=np.float32), ids_TK)
        K = ids_TK.shape[1]
        total = xp.maximum(xp.sum(counts_X[:E]), np.float32(1))
        use_E = counts_X[:E] * (np.float32(K) / total)
        before_E = state["before_LE"][layer]
        past_E = state["past_LE"][layer] * np.float32(self.discount) + before_E
        steps_L = add_at(state["steps_L"], layer, np.float32(1))
        used_LE = add_at(state["used_LE"], layer, use_E)
        after_LEE = add_at(state["after_LEE"], layer, past_E[:, None] * use_E[None])
        decay = np.float32(0.5 ** (1 / self.half_life))
        recent_E = state["recent_LE"][layer] * decay + use_E * (1 - decay)
        # The steps in which an expert was used and has a successor.
        seen_E = used_LE[layer] - use_E
        share_E = use_E / ((seen_E + np.float32(self.prior)) * np.float32(K))
        mean_E = used_LE[layer] / (steps_L[layer] * np.float32(1 - self.discount))
        prior_E = mean_E * (np.float32(self.prior) * xp.sum(share_E))
        worth_E = recent_E + share_E @ after_LEE[layer] + prior_E
        keys = state["key_LE"][layer, :E]
        return state | {
            "steps_L": steps_L,
            "used_LE": used_LE,
            "recent_LE": set_at(state["recent_LE"], layer, recent_E),
            "before_LE": set_at(state["before_LE"], layer, use_E),
            "past_LE": set_at(state["past_LE"], layer, past_E),
            "after_LEE": after_LEE,
            "worth_B": set_at(state["worth_B"], keys, worth_E),
        }
