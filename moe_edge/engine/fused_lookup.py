"""A layer's look-up without a loop: all misses get their victims together.

The loop of `fused_cache.acquire` asks the policy for a victim a miss. Where a policy
has neither a `victim` nor a `gave_up` of its own, the slots have one order for a whole
look-up: what has come in meanwhile is wanted, so protected, and nothing else changes.
So the miss of urgency rank m takes the unprotected slot of rank m, with the results of
the loop, and what is to be computed is known before any record has moved.
"""

import jax
import jax.numpy as jnp

from moe_edge.engine.fused_cache import EVICTIONS, Cache, DeviceCache
from moe_edge.kernels import few, lookup, rows
from moe_edge.offload.evict_base import Eviction


def look_up(
    device: DeviceCache, cache: Cache, layer: int, ids_TK, scores_TE, seen_TK=None
) -> tuple[Cache, few.Rows]:
    """As `DeviceCache.acquire`, but for the records, which are still to be moved.

    Args:
      device: whose policy has no `own_choice`.
      cache: see `acquire`; so are all others.
      seen_TK: what the policy sees, also experts that are computed elsewhere; None:
        `ids_TK`.
    Returns:
      (cache, whose slots are as they were; the rows of each slot, as of `few.plan`).
    """
    policy, state, slot_N = device.policy, cache.policy, cache.slot_N
    seen_TK = ids_TK if seen_TK is None else seen_TK
    if is_own := type(policy).touch is not Eviction.touch:
        state, slot_N = device.touch(cache, layer, seen_TK, scores_TE)
    value_S = policy.value(state)
    if not _is_for_kernel(ids_TK, value_S):
        T, K = ids_TK.shape
        given = device, cache, layer, ids_TK, scores_TE, seen_TK
        cache, slot_P, host_P = look_up_by_xla(*given)
        where = slot_P.reshape(T, K), device.spec.num_slots, host_P.reshape(T, K)
        return cache, few.plan(*where)
    cache = cache._replace(policy=state, slot_N=slot_N)
    own = {"scores_TE": scores_TE, "clock": state["clock"] if is_own else None}
    cache, found = _by_kernel(device, cache, layer, ids_TK, value_S=value_S, **own)
    if not is_own:
        clock = 2 * (cache.step * device.spec.num_layers + layer)
        cache = cache._replace(policy=cache.policy | {"clock": clock})
    return cache, found


def look_ahead(
    device: DeviceCache, cache: Cache, layer, ids_M
) -> tuple[Cache, jax.Array]:
    """Gives slots to experts that a coming layer is expected to choose.

    Which is no use of them: nothing is refreshed. Those in slots stay there, the others
    enter as just after the look-up of the layer before.

    Args:
      device: whose policy has no `own_choice`, and each layer its own slots.
      layer: int or int32 scalar, the coming one.
      ids_M: int32, different ones; E where nothing is expected.
    Returns:
      (cache; int32 `[2, M]`, a plan of `kernels.prefetch` for the layer's slots).
    """
    # Of the layer before, whose own look-up comes later where it takes waves.
    clock = 2 * (cache.step * device.spec.num_layers + layer - 1)
    cache = cache._replace(policy=cache.policy | {"clock": clock})
    ids_1M, policy, state = ids_M[None], device.policy, cache.policy
    if rows.are_possible() and _is_for_kernel(ids_1M, value_S := policy.value(state)):
        like = jax.ShapeDtypeStruct((1, device.spec.num_experts), jnp.float32)
        own = {"scores_TE": like, "clock": state["clock"], "is_use": False}
        cache, found = _by_kernel(device, cache, layer, ids_1M, value_S=value_S, **own)
        slot_M, host_M = found.record_B, found.host_B
    else:
        cache, slot_M, host_M, counts_3 = _admit(device, cache, layer, ids_1M, None)
        counts_3 = jnp.where(jnp.arange(3) == EVICTIONS, counts_3, 0)
        counts_L3 = cache.counts_L3.at[layer].add(counts_3)
        cache = cache._replace(counts_L3=counts_L3)
    return cache, jnp.stack([host_M, device.place_of(layer, slot_M)])


def _is_for_kernel(ids_TK, value_S) -> bool:
    is_float = value_S is None or value_S.dtype == jnp.float32
    return ids_TK.size <= lookup.MOST_PAIRS and is_float


def _by_kernel(device, cache, layer, ids_TK, **own) -> tuple[Cache, few.Rows]:
    state = cache.policy
    names = state["key_S"], state["last_B"], cache.slot_N, cache.counts_L3
    owner_S = jnp.asarray(device.spec.layer_S, jnp.int32)
    given = lookup.Tables(*names), layer, cache.step, ids_TK, owner_S
    tables, found = lookup.look_up(*given, **own)
    state = state | {"key_S": tables.key_S, "last_B": tables.last_B}
    changed = {"slot_N": tables.slot_B, "counts_L3": tables.counts_L3}
    return cache._replace(policy=state, **changed), found


def look_up_by_xla(
    device: DeviceCache, cache: Cache, layer, ids_TK, scores_TE, seen_TK=None
):
    """The same of any number of pairs.

    Returns:
      (cache; int32 `[P]`, the slot of each pair's expert, S for none; int32 `[P]`, the
      expert that the slot is to be filled with, -1: it holds it).
    """
    seen_TK = ids_TK if seen_TK is None else seen_TK
    state, slot_N = device.touch(cache, layer, seen_TK, scores_TE)
    cache = cache._replace(policy=state, slot_N=slot_N)
    cache, *found, counts_3 = _admit(device, cache, layer, ids_TK, scores_TE)
    counts_L3 = cache.counts_L3.at[layer].add(counts_3)
    return cache._replace(counts_L3=counts_L3), *found


def _admit(device: DeviceCache, cache: Cache, layer, ids_TK, scores_TE):
    """As `look_up_by_xla` behind the policy's `touch`, with what is to be counted.

    Args:
      scores_TE: None: of one row.
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
