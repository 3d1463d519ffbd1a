"""MoE-Infinity's eviction: what this sequence used, by how soon it can recur."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import count_at, module_of, set_at
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import CacheSpec, Eviction, State


@register
@dataclasses.dataclass(frozen=True)
class MoeInfinity(Eviction):
    """Lowest layer decay x the sequence's normalised row x visits while in the cache.

    The decay is 1 - distance / (L + 1), the distance counted forwards from the layer
    looked up last and around into the next token, where the layers behind it run
    next. A block that was prefetched and not used yet counts as visited once, else
    it would be the first to go.
    """

    name = "moe_infinity"
    per_sequence = True
    SOURCE = "MoE-Infinity, arXiv 2401.14361, expert cache"
    # `tokens_B` is the sequence's activation matrix.
    per_block = {"tokens_B": np.int32, "visits_B": np.int32}

    def init(self, spec: CacheSpec, xp=np) -> State:
        total_L = xp.zeros((spec.num_layers,), dtype=np.int32)
        return {**super().init(spec, xp), "total_L": total_L}

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        xp = module_of(state["key_S"])
        keys = state["key_LE"][layer, ids_TK]
        total = state["total_L"][layer] + xp.sum(keys >= 0, dtype=np.int32)
        return {
            **state,
            "tokens_B": count_at(state["tokens_B"], keys),
            "total_L": set_at(state["total_L"], layer, total),
            "visits_B": count_at(state["visits_B"], keys),
        }

    def resume(self, state: State) -> State:
        xp, visits_B = module_of(state["key_S"]), state["visits_B"]
        held_B = set_at(xp.zeros(visits_B.shape, bool), state["key_S"], True)
        return {**state, "visits_B": xp.where(held_B, visits_B, 0)}

    def value(self, state: State):
        key_S, L = state["key_S"], state["key_LE"].shape[0]
        E = state["key_LE"].shape[1] - 1
        xp = module_of(key_S)
        layer_S = key_S // E
        ahead_S = ((layer_S - state["clock"] // 2) % L).astype(np.float32)
        total_S = xp.maximum(state["total_L"][layer_S], 1).astype(np.float32)
        row_S = state["tokens_B"][key_S].astype(np.float32) / total_S
        visits_S = xp.maximum(state["visits_B"][key_S], 1).astype(np.float32)
        decay_S = np.float32(1) - ahead_S / np.float32(L + 1)
        return decay_S * (row_S + np.float32(1e-8)) * visits_S

    def gave_up(self, state: State, slot):
        visits_B = set_at(state["visits_B"], state["key_S"][slot], 0)
        return {**state, "visits_B": visits_B}
