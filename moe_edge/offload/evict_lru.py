"""Least recently used, the classical baseline, and the floor: nothing is kept."""

import dataclasses

import numpy as np

from moe_edge.core.arrays import module_of, set_at
from moe_edge.core.plug_in import register
from moe_edge.offload.evict_base import Eviction, State


@register
@dataclasses.dataclass(frozen=True)
class Lru(Eviction):
    """Gives up the block whose last use lies furthest back."""

    name = "lru"
    SOURCE = "Eliseev and Mazur, Fast inference of MoE with offloading, section 3.1"


@register
@dataclasses.dataclass(frozen=True)
class OnDemand(Eviction):
    """A block is gone once its lookup is over: the next one finds its slot empty.

    Only a block that was prefetched and not used yet survives a lookup.
    """

    name = "on_demand"
    SOURCE = "the floor of caching: nothing is kept"
    forgets = True
    per_block = {"used_B": bool}

    def touch(self, state: State, layer, ids_TK, scores_TE, step) -> State:
        key_S = state["key_S"]
        xp = module_of(key_S)
        kept_S = xp.where(state["used_B"][key_S], -1, key_S).astype(np.int32)
        state = super().touch(state, layer, ids_TK, scores_TE, step)
        used_B = xp.zeros(state["used_B"].shape, dtype=bool)
        keys = state["key_LE"][layer, ids_TK]
        return {**state, "key_S": kept_S, "used_B": set_at(used_B, keys, True)}
