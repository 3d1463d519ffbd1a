"""A layer's look-up in the slot cache on a GPU: one Triton kernel (Pallas).

Compiled by XLA it is a dozen kernels a layer, which take longer to launch than to run.
Here one program holds the order of all slots in registers and picks a victim a miss; it
reads all that it needs of an array before it writes to it, because arrays of the
cache's state are changed in place.

What a coming layer is expected to choose is looked up likewise, in a launch of its own
or by a second program of the layer's: where each layer has its own slots, neither reads
what the other writes.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels.few import Rows
from moe_edge.kernels.rows import is_interpreted

MOST_PAIRS = 128  # which are compared with each other in registers
NEVER = jnp.iinfo(jnp.int32).max
HITS, MISSES, EVICTIONS = range(3)  # columns of `Tables.counts_L3`
FETCHED, USED = range(2)  # of `Tables.ahead_2`


class Tables(NamedTuple):
    """What says who is where, changed in place."""

    key_S: jax.Array  # int32, block in each slot: layer * E + expert; -1: none
    last_B: jax.Array  # int32, time of each block's last use; the last entry is spare
    slot_B: jax.Array  # int32, slot of each block; -1: none; the last entry is spare
    counts_L3: jax.Array  # int32, of distinct experts
    # int32, blocks fetched ahead of need, and those used since; None: none are.
    ahead_2: jax.Array | None = None


class Here(NamedTuple):
    """The layer that is looked up, and when."""

    layer: int | jax.Array
    first: int | jax.Array  # its first slot's number, or 0: places count from there
    step: jax.Array  # int32 scalar
    # int32 scalar, the time of a policy that has taken note of this use itself; None:
    # it is 2 * (step * L + layer), and noted here.
    clock: jax.Array | None = None


class Ahead(NamedTuple):
    """What a coming layer is expected to choose: to be fetched, but no use of it."""

    layer: int | jax.Array
    first: int | jax.Array  # as of `Here`
    ids_M: jax.Array  # int32, different ones, the surest first; E: nothing
    limit: int  # most that are fetched


def look_up(
    tables: Tables,
    here: Here,
    ids_TK: jax.Array,
    layer_S: jax.Array,
    *,
    scores_TE: jax.Array,
    value_S: jax.Array | None,
    ahead: Ahead | None = None,
) -> tuple[Tables, Rows, jax.Array | None]:
    """Finds the slots of chosen experts, and a victim's slot for each absent one.

    Args:
      tables: donated.
      ids_TK: int32; E is padding.
      layer_S: int32, the layer whose slots they are; -1: of all.
      scores_TE: float32; of several rows the experts with the best ones get the first
        victims, of one row those that were chosen first.
      value_S: float32, what slots hold is given up in this order; None: by last use.
      ahead: of another layer, with slots of its own; its time is that of `here`
        without a clock. None: nothing is fetched ahead.
    Returns:
      (tables; the rows of each place, as of `few.plan`; a plan as of `look_ahead`,
      None without `ahead`).
    """
    (T, K), E = ids_TK.shape, scores_TE.shape[1]
    P, sizes = T * K, _Sizes.of(tables, E)
    given = {"ids": ids_TK.reshape(-1), "step": here.step.reshape(1)}
    given |= _numbers(layer=here.layer, first=here.first)
    given |= {} if here.clock is None else {"clock": here.clock.reshape(1)}
    given |= {"scores": scores_TE} if T > 1 else {}
    names = [f"rows.{name}" for name in Rows._fields]
    new = {name: jax.ShapeDtypeStruct((P,), jnp.int32) for name in names}
    works = [lambda refs: _use(refs, sizes, T, K, has_clock=here.clock is not None)]
    widest = P
    if ahead is not None:
        M = ahead.ids_M.size
        given |= _of_ahead(ahead)
        new["plan"] = jax.ShapeDtypeStruct((2, M), jnp.int32)
        works.append(lambda refs: _expect(refs, sizes, M, ahead.limit))
        widest = max(P, M)
    found = _launch(works, tables, given | _of_slots(layer_S, value_S), new, widest)
    tables, rows = _tables_of(found), Rows(*(found[name] for name in names))
    return tables, rows, found.get("plan")


def look_ahead(
    tables: Tables,
    ahead: Ahead,
    step: jax.Array,
    experts: int,
    layer_S: jax.Array,
    *,
    value_S: jax.Array | None,
) -> tuple[Tables, jax.Array]:
    """Slots for experts that a coming layer is expected to choose; nobody is used.

    Those in slots stay there; others enter as just after the look-up of the layer
    before.

    Args:
      tables, layer_S, value_S: as of `look_up`.
      step: int32 scalar.
      experts: E.
    Returns:
      (tables; int32 `[2, M]`, a plan of `kernels.prefetch`: records, then places).
    """
    sizes, M = _Sizes.of(tables, experts), ahead.ids_M.size
    given = _of_ahead(ahead) | {"step": step.reshape(1)} | _of_slots(layer_S, value_S)
    new = {"plan": jax.ShapeDtypeStruct((2, M), jnp.int32)}
    works = [lambda refs: _expect(refs, sizes, M, ahead.limit)]
    found = _launch(works, tables, given, new, M)
    return _tables_of(found), found["plan"]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    experts: int  # E
    layers: int  # L
    slots: int  # S
    blocks: int  # B

    @classmethod
    def of(cls, tables: Tables, experts: int):
        layers = tables.counts_L3.shape[0]
        return cls(experts, layers, tables.key_S.size, tables.last_B.size)


def _numbers(**numbers) -> dict[str, jax.Array]:
    # As data: so all layers are one kernel, compiled once. An array each: of several
    # equal constants in one XLA makes a kernel.
    return {name: jnp.full(1, number, jnp.int32) for name, number in numbers.items()}


def _of_ahead(ahead: Ahead) -> dict[str, jax.Array]:
    numbers = _numbers(coming=ahead.layer, coming_first=ahead.first)
    return numbers | {"expected": ahead.ids_M}


def _of_slots(layer_S, value_S) -> dict[str, jax.Array]:
    return {"owner": layer_S} | ({} if value_S is None else {"value": value_S})


def _tables_of(found: dict[str, jax.Array]) -> Tables:
    return Tables(*(found.get(name) for name in Tables._fields))


def _launch(
    works: list[Callable[[dict], None]],
    tables: Tables,
    given: dict[str, jax.Array],
    new: dict[str, jax.ShapeDtypeStruct],
    pairs: int,
) -> dict[str, jax.Array]:
    """A program each, which finds by name what is given, as it was, and `new.` before
    what it writes."""
    changed = {name: x for name, x in tables._asdict().items() if x is not None}
    outs = changed | new

    def kernel(*refs):
        names = [*given, *changed, *(f"new.{name}" for name in outs)]
        named = dict(zip(names, refs, strict=True))
        if len(works) == 1:
            works[0](named)
            return
        for number, work in enumerate(works):
            pl.when(pl.program_id(0) == number)(lambda work=work: work(named))

    lanes, width = pl.next_power_of_2(pairs), pl.next_power_of_2(tables.key_S.size)
    warps = 4 if max(width, lanes**2 // 16) <= 512 else 8 if width <= 4096 else 16
    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs.values()],
        grid=(len(works),),
        input_output_aliases={len(given) + at: at for at in range(len(changed))},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=is_interpreted(),
        name="moe_edge_look_up",
    )(*given.values(), *changed.values())
    return dict(zip(outs, found, strict=True))


def _use(refs, sizes: _Sizes, T: int, K: int, has_clock: bool) -> None:
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


def _expect(refs, sizes: _Sizes, M: int, limit: int) -> None:
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


def _give(refs, sizes: _Sizes, layer, wanted, now, key_P, slot_P, miss_P, misses):
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
