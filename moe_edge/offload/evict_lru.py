"""Least recently used: the classical baseline, also of Mixtral-offloading."""

import dataclasses

from moe_edge.offload.evict_base import EvictionPolicy


@dataclasses.dataclass(frozen=True)
class Lru(EvictionPolicy):
    """Gives up the block whose last use lies furthest back."""

    name = "lru"
    SOURCE = "Eliseev and Mazur, Fast inference of MoE with offloading, section 3.1"
