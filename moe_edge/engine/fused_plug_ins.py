"""What policies and routes of other authors did wrong in a step of the fused engine."""

import jax.numpy as jnp

from moe_edge.engine.fused_cache import Cache
from moe_edge.offload.evict_base import Eviction
from moe_edge.route.base import Route


def what_is_wrong(
    state: Cache, policy: Eviction, route: Route, experts: int
) -> str | None:
    """For people; None: nothing. Waits for the device, but where all are ours."""
    if state.wrong is not None and (times := int(state.wrong)):
        return (
            f"eviction policy {policy.name} gave up slots that are protected or not "
            f"there, {times} times in a step; victim must choose among the others"
        )
    if state.refused is not None and (times := int(state.refused)):
        return (
            f"route policy {route.name} chose what cannot be computed, {times} times "
            f"in a step; expected finite weights and ids from 0 to {experts}, which is "
            "none, each expert once a token"
        )
    return None


def forgiven(state: Cache) -> Cache:
    """With nothing counted as wrong."""
    changed = {
        name: jnp.int32(0)
        for name in ("wrong", "refused")
        if getattr(state, name) is not None
    }
    return state._replace(**changed)
