"""What the programs of a look-up's kernel do (`lookup.py`): a layer's own choice, and
what a coming layer is expected to choose.

They find arrays by name, as they were; under `new.` what they write.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

NEVER = jnp.iinfo(jnp.int32).max
HITS, MISSES, EVICTIONS = range(3)  # columns of `lookup.Tables.counts_L3`
FETCHED, USED = range(2)  # of `lookup.Tables.ahead_2`


class Sizes(NamedTuple):
    experts: int  # E
    layers: int  # L
    slots: int  # S
    blocks: int  # B


def use(refs, sizes: Sizes, T: int, K: int, has_clock: bool) -> None:
    """The program of a layer's own look-up."""
    P, E, spare = T * K, sizes.experts, sizes.blocks - 1
    layer, first = refs["layer"][0], refs["first"][0]
    now = 2 * (refs["step"][0] * sizes.layers + layer)
    if has_clock:
        now = refs["clock"][0]

    # Of each expert the first pair stands for it.
    pairs_P = jnp.arange(pl.next_power_of_2(P), dtype=jnp.int32)
    is_pair_P = pairs_P < P
    ids_P = triton.load(refs["ids"].at[pairs_P], mask=is_pair_P, other=E)
    is_real_P = ids_P < E
    key_P = jnp.where(is_real_P, layer * E + ids_P, spare)
    slot_P = triton.load(refs["slot_B"].at[key_P], mask=is_real_P, other=sizes.slots)
    is_same_PP = ids_P[:, None] == ids_P[None]
    is_before_PP = pairs_P[None] < pairs_P[:, None]
    is_first_P = is_real_P & (_count(is_same_PP & is_before_PP) == 0)
    is_miss_P = slot_P < 0
    comes_P = is_first_P & is_miss_P
    sooner_PP = is_before_PP
    if T > 1:
        at_P = pairs_P // K, jnp.minimum(ids_P, E - 1)
        score_P = triton.load(refs["scores"].at[at_P], mask=is_real_P, other=0.0)
        score_P = jnp.where(score_P == score_P, score_P, jnp.inf)
        score_PP = jnp.where(is_same_PP, score_P[None], -jnp.inf)
        urgency_P = jnp.max(score_PP, axis=1)
        sooner_PP = urgency_P[None] > urgency_P[:, None]
        is_tie_PP = urgency_P[None] == urgency_P[:, None]
        sooner_PP |= is_tie_PP & (ids_P[None] < ids_P[:, None])
    if is_counted := "ahead_2" in refs and not has_clock:
        last_P = triton.load(refs["last_B"].at[key_P], mask=is_real_P, other=0)
        # As of `DeviceCache.unused_LE`.
        is_ahead_P = (last_P % 2 == 1) & (last_P // 2 % sizes.layers == layer - 1)
        used = _total(is_first_P & ~is_miss_P & is_ahead_P)
    comes_1P = jnp.broadcast_to(comes_P[None], is_same_PP.shape)
    miss_P = _count(comes_1P & sooner_PP)
    misses, chosen = _total(comes_P), _total(is_first_P)

    given = refs, sizes, layer, ("ids", P), now
    slot_P, evictions = _give(*given, key_P, slot_P, miss_P, misses)

    if not has_clock:
        now_P = jnp.full_like(ids_P, 1) * now
        at_P = refs["new.last_B"].at[key_P]
        triton.store(at_P, now_P, mask=is_real_P & ~is_miss_P)
        # Padding is a use of the spare block.
        padding = _total(is_pair_P & ~is_real_P)
        at = jnp.int32(spare)
        before = refs["last_B"][at]
        refs["new.last_B"][at] = jnp.where(padding > 0, now, before)
    for column, more in (
        (HITS, chosen - misses),
        (MISSES, misses),
        (EVICTIONS, evictions),
    ):
        _add(refs, "counts_L3", (layer, jnp.int32(column)), more)
    if is_counted:
        _add(refs, "ahead_2", jnp.int32(USED), used)

    # Blocks of rows, those of absent experts first.
    earlier_P = _count(comes_1P & is_before_PP)
    block_P = jnp.where(comes_P, earlier_P, misses + pairs_P - earlier_P)
    row_P = _count(ids_P[None] < ids_P[:, None])
    for name, array_P in (
        ("record_B", jnp.where(is_first_P, slot_P - first, 0)),
        ("row_B", row_P),
        ("count_B", jnp.where(is_first_P, _count(is_same_PP), 0)),
        ("host_B", jnp.where(comes_P, ids_P, -1)),
    ):
        triton.store(refs[f"new.rows.{name}"].at[block_P], array_P, mask=is_pair_P)
    place_P = row_P + _count(is_same_PP & is_before_PP)
    triton.store(refs["new.rows.pair_P"].at[place_P], pairs_P, mask=is_pair_P)


def expect(refs, sizes: Sizes, M: int, limit: int) -> None:
    """The program of a coming layer's look-up."""
    E, spare = sizes.experts, sizes.blocks - 1
    layer, first = refs["coming"][0], refs["coming_first"][0]
    now = 2 * (refs["step"][0] * sizes.layers + layer - 1)
    pairs_M = jnp.arange(pl.next_power_of_2(M), dtype=jnp.int32)
    is_pair_M = pairs_M < M
    ids_M = triton.load(refs["expected"].at[pairs_M], mask=is_pair_M, other=E)
    is_real_M = ids_M < E
    key_M = jnp.where(is_real_M, layer * E + ids_M, spare)
    slot_M = triton.load(refs["slot_B"].at[key_M], mask=is_real_M, other=sizes.slots)
    is_before_MM = pairs_M[None] < pairs_M[:, None]
    is_absent_MM = jnp.broadcast_to((slot_M < 0)[None], is_before_MM.shape)
    miss_M = _count(is_absent_MM & is_before_MM)
    comes_M = (slot_M < 0) & (miss_M < limit)
    misses = _total(comes_M)

    given = refs, sizes, layer, ("expected", M), now
    slot_M, evictions = _give(*given, key_M, slot_M, miss_M, misses)

    _add(refs, "counts_L3", (layer, jnp.int32(EVICTIONS)), evictions)
    _add(refs, "ahead_2", jnp.int32(FETCHED), misses)
    for row, array_M in (
        (0, jnp.where(comes_M, ids_M, -1)),
        (1, jnp.where(comes_M, slot_M - first, 0)),
    ):
        at_M = jnp.full_like(pairs_M, row), pairs_M
        triton.store(refs["new.plan"].at[at_M], array_M, mask=is_pair_M)


def _give(refs, sizes: Sizes, layer, wanted, now, key_P, slot_P, miss_P, misses):
    """A victim's slot for each absent block.

    Args:
      wanted: the name of ids that stay, and how many.
      now: time of the look-up.
      key_P, slot_P: of each pair's block, its slot below 0 where it is absent.
      miss_P: which miss in turn an absent block is.
      misses: how many get a slot.
    Returns:
      (slot_P with theirs, evictions).
    """
    S, E, spare = sizes.slots, sizes.experts, sizes.blocks - 1
    slots_S = jnp.arange(pl.next_power_of_2(S), dtype=jnp.int32)
    is_slot_S = slots_S < S
    key_S = triton.load(refs["key_S"].at[slots_S], mask=is_slot_S, other=-1)
    owner_S = triton.load(refs["owner"].at[slots_S], mask=is_slot_S, other=sizes.layers)
    is_empty_S = key_S < 0
    last_S = triton.load(refs["last_B"].at[jnp.where(is_empty_S, spare, key_S)])
    last_S = jnp.where(is_empty_S, -2, last_S)
    value_S = None
    if "value" in refs:
        value_S = triton.load(refs["value"].at[slots_S], mask=is_slot_S, other=0.0)
        value_S = jnp.where(is_empty_S, -jnp.inf, value_S)
    name, count = wanted
    is_absent_P = slot_P < 0

    # What is wanted and what is another layer's stays.
    def keep(place, is_free_S):
        expert = refs[name][place]
        key = jnp.where(expert < E, layer * E + expert, -2)
        return is_free_S & (key_S != key)

    is_free_S = is_slot_S & ((owner_S < 0) | (owner_S == layer))
    is_free_S = lax.fori_loop(0, count, keep, is_free_S)

    def give(miss, carry):
        is_free_S, slot_P, evictions = carry
        is_best_S = is_free_S
        if value_S is not None:
            least = jnp.min(jnp.where(is_best_S, value_S, jnp.inf))
            is_best_S &= value_S <= least
        oldest = jnp.min(jnp.where(is_best_S, last_S, NEVER))
        is_best_S &= last_S <= oldest
        slot = jnp.min(jnp.where(is_best_S, slots_S, S - 1))
        is_here_S = slots_S == slot
        old = jnp.max(jnp.where(is_here_S, key_S, -1))
        is_now_P = is_absent_P & (miss_P == miss)
        key = jnp.max(jnp.where(is_now_P, key_P, 0))
        refs["new.slot_B"][jnp.where(old < 0, spare, old)] = jnp.int32(-1)
        refs["new.slot_B"][key] = slot
        refs["new.key_S"][slot] = key
        refs["new.last_B"][key] = now + 1
        gone = (old >= 0).astype(jnp.int32)
        slot_P = jnp.where(is_now_P, slot, slot_P)
        return is_free_S & ~is_here_S, slot_P, evictions + gone

    carry = is_free_S, slot_P, jnp.int32(0)
    _, slot_P, evictions = lax.fori_loop(0, misses, give, carry)
    return slot_P, evictions


def _add(refs, name: str, at, more) -> None:
    """To a counter that no other program of the launch writes."""
    refs[f"new.{name}"][at] = refs[name][at] + more


def _total(is_it_P) -> jax.Array:
    return jnp.sum(is_it_P.astype(jnp.int32))


def _count(is_it_PP) -> jax.Array:
    """How many of each row."""
    return jnp.sum(is_it_PP.astype(jnp.int32), axis=1)
