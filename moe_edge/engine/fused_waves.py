"""A layer's routed experts inside a compiled program, through slots that may be few.

A wave is a part of the layer's (token, expert) pairs whose experts fit the slots
together: it is looked up, fetched and computed before the next one. Waves follow the
order of `model/expert_waves.py`, so the bits do not depend on the number of slots.
Each wave is a look-up of its own for the policy. Counters keep the law of
`offload/statistics.py`: hits are the experts that no wave of the layer fetched.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_edge.engine.fused_assist import Helped, HelpedWaves
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.fused_prefetch import Expected, UnderWay, begin
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.router import Routing


def run_through_slots(
    device: DeviceCache,
    waves: ExpertWaves | HelpedWaves,
    cache: Cache,
    layer,
    hidden_TD: jax.Array,
    routing: Routing,
    host_ER: jax.Array,
    expected: Expected | None = None,
    helped: Helped | None = None,
) -> tuple[Cache, jax.Array, UnderWay | None]:
    """The weighted sum of the chosen experts.

    Args:
      layer: int or int32 scalar.
      hidden_TD: float32.
      routing: what to compute; its scores (>= 0) are for the policy.
      host_ER: the layer's records in host memory.
      expected: what the next layer is to find; None: nothing.
      helped: what the host computes, which these waves add; None: nothing.
    Returns:
      (cache, float32 `[T, D]`, what is under way for the next layer).
    """
    ids_TK, weights_TK, scores_TE = routing
    E = device.spec.num_experts
    # What a policy sees of one wave is the whole choice; the slots see the rest.
    seen_TK, elsewhere_E = ids_TK, None
    if helped is not None:
        ids_TK, elsewhere_E = helped.ids_TK, helped.elsewhere_E

    def run_wave(cache, total, wave_TK, hidden_TD=hidden_TD, expected=None, seen=None):
        absent = (elsewhere_E,) if seen is not None else ()
        seen = wave_TK if seen is None else seen
        given = cache, layer, seen, scores_TE, host_ER, *absent
        cache, fetched_E = device.acquire(*given)
        given = device, cache, expected, hidden_TD
        cache, under_way, hidden_TD = begin(*given)
        slot_of = _places(device, cache, layer, wave_TK, waves.method)
        total = waves.run(total, hidden_TD, ids_TK, weights_TK, cache.slots_SR, slot_of)
        return cache, total, fetched_E, under_way

    def more(carry):
        return jnp.any(carry[2] < E)

    def step(carry):
        cache, total, rest_TK, missed_E = carry
        if waves.method == "pairs":
            now_TK = next_pairs(rest_TK, E, capacity)
        else:
            resident_E = device.slots_of(cache, layer) >= 0
            now_TK = next_experts(rest_TK, resident_E, capacity)
        wave_TK = jnp.where(now_TK, rest_TK, E)
        cache, total, fetched_E, _ = run_wave(cache, total, wave_TK)
        rest_TK = jnp.where(now_TK, E, rest_TK)
        return cache, total, rest_TK, missed_E | fetched_E

    total = waves.start(hidden_TD, ids_TK)
    if min(ids_TK.size, E) <= device.least_capacity:
        given = cache, total, ids_TK, hidden_TD, expected, seen_TK
        cache, total, _, under_way = run_wave(*given)
    else:
        cache, under_way, hidden_TD = begin(device, cache, expected, hidden_TD)
        capacity = jnp.asarray(device.capacity_L, jnp.int32)[layer]
        before, none_E = cache, jnp.zeros(E, bool)
        cache, total, _, missed_E = lax.while_loop(
            more, step, (cache, total, ids_TK, none_E)
        )
        hit_E = chosen(ids_TK, E) & ~missed_E
        cache = device.settle_hits(before, cache, layer, hit_E)
    return cache, waves.finish(total, ids_TK, weights_TK), under_way


def sum_of_present(
    device: DeviceCache,
    waves: ExpertWaves,
    cache: Cache,
    layer,
    hidden_TD: jax.Array,
    routing: Routing,
) -> tuple[jax.Array, jax.Array]:
    """What the chosen experts in slots give, before a look-up has changed any.

    Args: as of `run_through_slots`.
    Returns:
      (float32 `[T, D]`; bool, whether a chosen one is in no slot).
    """
    ids_TK, weights_TK, _ = routing
    is_absent_E = device.slots_of(cache, layer) < 0
    lacks = jnp.any(chosen(ids_TK, len(is_absent_E)) & is_absent_E)
    place_of = _places(device, cache, layer, ids_TK, waves.method)
    total = waves.start(hidden_TD, ids_TK)
    given = hidden_TD, ids_TK, weights_TK, cache.slots_SR, place_of
    total = waves.run(total, *given)
    return waves.finish(total, ids_TK, weights_TK), lacks


def _places(device: DeviceCache, cache: Cache, layer, ids_TK, method: str) -> jax.Array:
    """`slot_of` of `ExpertWaves.run`: where experts stand in the layer's array; beyond
    it, what is in no slot."""
    E, S = device.spec.num_experts, device.spec.num_slots
    slot_E = device.slots_of(cache, layer)
    slot_E = jnp.where(slot_E < 0, S, slot_E)
    if method == "pairs":
        slot_of = jnp.where(ids_TK < E, slot_E[jnp.minimum(ids_TK, E - 1)], S)
    else:
        slot_of = jnp.where(chosen(ids_TK, E), slot_E, S)
    return device.place_of(layer, slot_of)


def next_pairs(rest_TK, experts: int, capacity) -> jax.Array:
    """The longest run of the next pairs with at most `capacity` distinct experts.

    Args:
      rest_TK: int32, pairs still to compute; E elsewhere.
      experts: E.
      capacity: int or int32 scalar, at least 1.
    Returns:
      bool `[T, K]`.
    """
    ids_1P = rest_TK.reshape(1, -1)
    never = ids_1P.shape[1]
    places_1P = jnp.arange(never, dtype=jnp.int32)[None]
    is_expert_EP = ids_1P == jnp.arange(experts, dtype=jnp.int32)[:, None]
    first_E = jnp.min(jnp.where(is_expert_EP, places_1P, never), axis=1)
    distinct_P = jnp.sum(first_E[:, None] <= places_1P, axis=0)
    return (distinct_P <= capacity).reshape(rest_TK.shape) & (rest_TK < experts)


def next_experts(rest_TK, resident_E, capacity) -> jax.Array:
    """The pairs of up to `capacity` experts, those in the slots before others.

    Args: as `next_pairs`; resident_E: bool, who is in a slot.
    """
    E = resident_E.shape[0]
    chosen_E = chosen(rest_TK, E)
    hits_E, misses_E = chosen_E & resident_E, chosen_E & ~resident_E
    after_hits_E = jnp.sum(hits_E) + jnp.cumsum(misses_E)
    place_E = jnp.where(hits_E, jnp.cumsum(hits_E), after_hits_E)
    now_E = chosen_E & (place_E <= capacity)
    return now_E[jnp.minimum(rest_TK, E - 1)] & (rest_TK < E)


def chosen(ids_TK, experts: int) -> jax.Array:
    """Which experts occur, bool `[E]`."""
    experts_E1 = jnp.arange(experts, dtype=jnp.int32)[:, None]
    return jnp.any(ids_TK.reshape(1, -1) == experts_E1, axis=1)
