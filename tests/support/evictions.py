"""Eviction policies of any name, with what a run of some size would give them."""

import numpy as np

from moe_edge.core.context import Context
from moe_edge.offload.evict_base import EVICTIONS, Eviction


def eviction_of(name: str, num_layers: int, num_experts: int) -> Eviction:
    """The policy for a run of so many layers and experts, whatever it asks for."""
    L, E = num_layers, num_experts
    run = Context(
        profile=lambda: np.random.default_rng(1).integers(0, 9, (L, E)),
        future=lambda: [[list(range(0, 60, 2 + e)) for e in range(E)]] * L,
        prompt_steps=lambda: 4,
    )
    return EVICTIONS.make(name, {}, run)
