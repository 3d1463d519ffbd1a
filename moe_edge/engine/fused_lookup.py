"""A layer's look-up without a loop: all misses get their victims together.

The loop of `fused_cache.acquire` asks the policy for a victim a miss. Where a policy
has neither a `victim` nor a `gave_up` of its own, the slots have one order for a whole
look-up: what has come in meanwhile is wanted, so protected, and nothing else changes.
So the miss of urgency rank m takes the unprotected slot of rank m, with the results of
the loop, and what is to be computed is known before any record has moved.
"""

import jax
import jax.numpy as jnp

from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.kernels import few, lookup, rows
from moe_edge.kernels.lookup import Ahead
from moe_edge.kernels.lookup_programs import EVICTIONS, FETCHED
from moe_edge.offload.evict_base import Eviction


def look_up(
    device: DeviceCache,
    cache: Cache,
    layer: int,
    ids_TK,
    scores_TE,
    seen_TK=None,
    ahead: Ahead | None = None,
) -> tuple[Cache, few.Rows, jax.Array | None]:
    """As `DeviceCache.acquire`, but for the records, which are still to be moved.

    Args:
      device: whose policy has no `own_choice`.
      cache: see `acquire`; so are all others.
      seen_TK: what the policy sees, also experts that are computed elsewhere; None:
        `ids_TK`.
      ahead: as of `look_ahead`, which is done besides: in the same launch where it can.
    Returns:
      (cache, whose slots are as they were; the rows of each place of the layer's slots,
      as of `few.plan`; the plan of `look_ahead`, None without `ahead`).
    """
    seen_TK = ids_TK if seen_TK is None else seen_TK
    if is_own := type(device.policy).touch is not Eviction.touch:
        cache = device.touch(cache, layer, seen_TK, scores_TE)
    value_S, plan_2M = device.policy.value(cache.policy), None
    if not _is_for_kernel(ids_TK, value_S):
        T, K = ids_TK.shape
        if not is_own:
            cache = device.touch(cache, layer, seen_TK, scores_TE)
        given = device, cache, layer, ids_TK, scores_TE
        cache, slot_P, host_P, counts_3 = admit(*given)
        cache = cache._replace(counts_L3=cache.counts_L3.at[layer].add(counts_3))
        where = slot_P.reshape(T, K), device.spec.num_slots, host_P.reshape(T, K)
        found = few.plan(*where)
        found = found._replace(record_B=device.place_of(layer, found.record_B))
    else:
        together = ahead if _is_for_one_launch(device, ahead) else None
        clock = cache.policy["clock"] if is_own else None
        here = lookup.Here(layer, device.first_of(layer), cache.step, clock)
        tables, found, plan_2M = lookup.look_up(
            *(_tables_of(cache), here, ids_TK, _owners(device)),
            **{"scores_TE": scores_TE, "value_S": value_S, "ahead": together},
        )
        cache = _with_tables(cache, tables)
        if not is_own or together is not None:
            cache = _at_time(device, cache, layer)
    if ahead is not None and plan_2M is None:
        cache, plan_2M = look_ahead(device, cache, ahead)
    return cache, found, plan_2M


def look_ahead(
    device: DeviceCache, cache: Cache, ahead: Ahead
) -> tuple[Cache, jax.Array]:
    """Gives slots to experts that a coming layer is expected to choose.

    Which is no use of them: nothing is refreshed. Those in slots stay there, the others
    enter as just after the look-up of the layer before.

    Args:
      device: whose policy has no `own_choice`, and each layer its own slots.
    Returns:
      (cache; int32 `[2, M]`, a plan of `kernels.prefetch` for the layer's slots).
    """
    layer, E = ahead.layer, device.spec.num_experts
    # Of the layer before, whose own look-up comes later where it takes waves.
    cache = _at_time(device, cache, layer - 1)
    ids_1M, value_S = ahead.ids_M[None], device.policy.value(cache.policy)
    if rows.are_possible() and _is_for_kernel(ids_1M, value_S):
        given = _tables_of(cache), ahead, cache.step, E, _owners(device)
        tables, plan_2M = lookup.look_ahead(*given, value_S=value_S)
        return _with_tables(cache, tables), plan_2M
    slot_E = device.slots_of(cache, layer)
    is_absent_1M = (ids_1M < E) & (slot_E[jnp.minimum(ids_1M, E - 1)] < 0)
    is_late_1M = is_absent_1M & (jnp.cumsum(is_absent_1M, axis=1) > ahead.limit)
    ids_1M = jnp.where(is_late_1M, E, ids_1M)
    cache, slot_M, host_M, counts_3 = admit(device, cache, layer, ids_1M, None)
    counts_3 = jnp.where(jnp.arange(3) == EVICTIONS, counts_3, 0)
    fetched_2 = jnp.where(jnp.arange(2) == FETCHED, _count(host_M >= 0), 0)
    cache = cache._replace(
        counts_L3=cache.counts_L3.at[layer].add(counts_3),
        ahead_2=cache.ahead_2 + fetched_2,
    )
    return cache, jnp.stack([host_M, device.place_of(layer, slot_M)])


def _is_for_kernel(ids_TK, value_S) -> bool:
    is_float = value_S is None or value_S.dtype == jnp.float32
    return ids_TK.size <= lookup.MOST_PAIRS and is_float


def _is_for_one_launch(device: DeviceCache, ahead: Ahead | None) -> bool:
    """Whether a look-up leaves what the other reads as it is: what slots are worth is
    asked before both."""
    is_by_block = type(device.policy).value is Eviction.value
    return ahead is not None and is_by_block and ahead.ids_M.size <= lookup.MOST_PAIRS


def _owners(device: DeviceCache) -> jax.Array:
    return jnp.asarray(device.spec.layer_S, jnp.int32)


def _tables_of(cache: Cache) -> lookup.Tables:
    state = cache.policy
    names = state["key_S"], state["last_B"], cache.slot_N, cache.counts_L3
    return lookup.Tables(*names, cache.ahead_2)


def _with_tables(cache: Cache, tables: lookup.Tables) -> Cache:
    state = {"key_S": tables.key_S, "last_B": tables.last_B}
    return cache._replace(
        policy=cache.policy | state,
        slot_N=tables.slot_B,
        counts_L3=tables.counts_L3,
        ahead_2=tables.ahead_2,
    )


def _at_time(device: DeviceCache, cache: Cache, layer) -> Cache:
    """Whose clock is that of a layer's look-up."""
    clock = 2 * (cache.step * device.spec.num_layers + layer)
    return cache._replace(policy=cache.policy | {"clock": clock})


def admit(device: DeviceCache, cache: Cache, layer, ids_TK, scores_TE):
    """A look-up by XLA behind the policy's `touch`, of any number of pairs.

    Args:
      scores_TE: None: of one row.
    Returns:
      (cache; int32 `[P]`, the slot of each pair's expert, S for none; int32 `[P]`, the
      expert that the slot is to be filled with, -1: it holds it; int32 `[3]`, hits,
      misses, evictions).
    """
    (T, K), E, S = ids_TK.shape, device.spec.num_experts, device.spec.num_slots
    state, slot_N = cache.policy, cache.slot_N
    ids_P, pairs_P = ids_TK.reshape(-1), jnp.arange(T * K, dtype=jnp.int32)
    is_real_P = ids_P < E
    key_P = jnp.where(is_real_P, layer * E + ids_P, -2)
    slot_P = jnp.where(is_real_P, slot_N[key_P], S)
    is_same_PP = ids_P[:, None] == ids_P[None]
    is_earlier_PP = is_same_PP & (pairs_P[None] < pairs_P[:, None])
    is_first_P = is_real_P & ~jnp.any(is_earlier_PP, axis=1)
    is_miss_P = slot_P < 0
    comes_P = is_first_P & is_miss_P
    misses, chosen = _count(comes_P), _count(is_first_P)
    if T == 1:  # the order of its choice
        urgency_P = -pairs_P.astype(jnp.float32)
    else:
        score_P = scores_TE[pairs_P // K, jnp.minimum(ids_P, E - 1)]
        score_P = jnp.where(score_P == score_P, score_P, jnp.inf)  # NaN has an order
        urgency_P = jnp.max(jnp.where(is_same_PP, score_P[None], -jnp.inf), axis=1)
    is_sooner_PP = urgency_P[None] > urgency_P[:, None]
    is_tie_PP = urgency_P[None] == urgency_P[:, None]
    is_sooner_PP |= is_tie_PP & (ids_P[None] < ids_P[:, None])
    miss_P = _count(comes_P[None] & is_sooner_PP, 1)

    key_S, owner_S = state["key_S"], jnp.asarray(device.spec.layer_S, jnp.int32)
    kept_S = jnp.any(key_S[:, None] == key_P[None], axis=1)
    free_S = ~(kept_S | (owner_S >= 0) & (owner_S != layer))
    victim_S = _order(device.policy, state, free_S)
    taken_S = free_S & (victim_S < misses)
    gone_S = jnp.where(taken_S, key_S, -1)

    # Who enters where, by comparing all with all: a scatter may be a loop.
    slots_S = jnp.arange(S, dtype=jnp.int32)
    enters_PS = is_miss_P[:, None] & taken_S[None] & (victim_S[None] == miss_P[:, None])
    new_P = jnp.sum(jnp.where(enters_PS, slots_S[None], 0), axis=1)
    new_S = jnp.max(jnp.where(enters_PS, key_P[:, None], -1), axis=0)
    numbers_N = jnp.arange(slot_N.size, dtype=jnp.int32)
    leaves_N = jnp.any(gone_S[None] == numbers_N[:, None], axis=1)
    enters_NP = is_miss_P[None] & (key_P[None] == numbers_N[:, None])
    new_N = jnp.max(jnp.where(enters_NP, new_P[None], -1), axis=1)
    slot_N = jnp.where(leaves_N, -1, jnp.where(new_N >= 0, new_N, slot_N))
    last_B = jnp.where(new_N >= 0, state["clock"] + 1, state["last_B"])
    counts_3 = jnp.stack([chosen - misses, misses, _count(gone_S >= 0)])
    cache = cache._replace(
        slot_N=slot_N,
        policy=state | {"key_S": jnp.where(taken_S, new_S, key_S), "last_B": last_B},
    )
    host_P = jnp.where(is_miss_P, ids_P, -1)
    return cache, jnp.where(is_miss_P, new_P, slot_P), host_P, counts_3


def _order(policy: Eviction, state, free_S) -> jax.Array:
    """How many of these slots are given up before each slot, int32 `[S]`."""
    key_S = state["key_S"]
    last_S = jnp.where(key_S < 0, -2, state["last_B"][key_S])
    at_S = jnp.arange(key_S.size, dtype=jnp.int32)
    is_before_SS = at_S[None] < at_S[:, None]
    for now_S in (last_S, policy.value(state)):
        if now_S is None:
            continue
        now_S = jnp.where(key_S < 0, -jnp.inf, now_S) if now_S is not last_S else now_S
        is_tie_SS = now_S[None] == now_S[:, None]
        is_before_SS = (now_S[None] < now_S[:, None]) | (is_tie_SS & is_before_SS)
    return _count(is_before_SS & free_S[None], 1)


def _count(is_it, axis=None) -> jax.Array:
    return jnp.sum(is_it, axis=axis, dtype=jnp.int32)
