"""A layer's look-up in the slot cache on a GPU: one Triton kernel (Pallas).

Compiled by XLA it is a dozen kernels a layer, which take longer to launch than to run.
Here one program holds the order of all slots in registers and picks a victim a miss; it
reads all that it needs of an array before it writes to it, because arrays of the
cache's state are changed in place.
"""

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


class Tables(NamedTuple):
    """What says who is where, changed in place."""

    key_S: jax.Array  # int32, block in each slot: layer * E + expert; -1: none
    last_B: jax.Array  # int32, time of each block's last use; the last entry is spare
    slot_B: jax.Array  # int32, slot of each block; -1: none; the last entry is spare
    counts_L3: jax.Array  # int32, hits, misses, evictions


def look_up(
    tables: Tables,
    layer: int,
    step: jax.Array,
    ids_TK: jax.Array,
    layer_S: jax.Array,
    *,
    scores_TE: jax.Array,
    value_S: jax.Array | None,
    clock: jax.Array | None,
    is_use: bool = True,
) -> tuple[Tables, Rows]:
    """Finds the slots of chosen experts, and a victim's slot for each absent one.

    Args:
      tables: donated.
      step: int32 scalar.
      ids_TK: int32; E is padding.
      layer_S: int32, the layer whose slots they are; -1: of all.
      scores_TE: float32; of several rows the experts with the best ones get the first
        victims, of one row those that were chosen first.
      value_S: float32, what slots hold is given up in this order; None: by last use.
      clock: int32 scalar, the time of a policy that has taken note of this use itself;
        None: it is 2 * (step * L + layer), and noted here.
      is_use: False: experts are fetched ahead of need, so neither hits nor misses.
    Returns:
      (tables; the rows of each slot, as of `few.plan`).
    """
    (T, K), E, L = ids_TK.shape, scores_TE.shape[1], tables.counts_L3.shape[0]
    P, S, B = T * K, tables.key_S.size, tables.last_B.size
    lanes, width = pl.next_power_of_2(P), pl.next_power_of_2(S)
    # The layer as data: so all layers are one kernel, compiled once.
    number = jnp.full(1, layer, jnp.int32)
    given = {"ids": ids_TK.reshape(-1), "step": step.reshape(1), "layer": number}
    given |= {"owner": layer_S, "clock": None if clock is None else clock.reshape(1)}
    given |= {"scores": scores_TE if T > 1 else None, "value": value_S}
    given = {name: array for name, array in given.items() if array is not None}
    first = len(given)
    given |= tables._asdict()
    outs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in tables]
    outs += [jax.ShapeDtypeStruct((P,), jnp.int32)] * len(Rows._fields)

    def kernel(*refs):
        before = dict(zip(given, refs, strict=False))
        refs = refs[len(given) :]
        key_ref, last_ref, slot_ref, counts_ref = refs[: len(tables)]
        rows = Rows(*refs[len(tables) :])
        layer = before["layer"][0]
        now = before["clock"][0] if "clock" in before else None
        now = 2 * (before["step"][0] * L + layer) if now is None else now

        # The pairs: of each expert the first one stands for it.
        pairs_P = jnp.arange(lanes, dtype=jnp.int32)
        is_pair_P = pairs_P < P
        ids_P = triton.load(before["ids"].at[pairs_P], mask=is_pair_P, other=E)
        is_real_P = ids_P < E
        key_P = jnp.where(is_real_P, layer * E + ids_P, B - 1)
        slot_P = triton.load(before["slot_B"].at[key_P], mask=is_real_P, other=S)
        is_same_PP = ids_P[:, None] == ids_P[None]
        is_before_PP = pairs_P[None] < pairs_P[:, None]
        is_first_P = is_real_P & (_count(is_same_PP & is_before_PP) == 0)
        is_miss_P = slot_P < 0
        comes_P = is_first_P & is_miss_P
        sooner_PP = is_before_PP
        if T > 1:
            at_P = pairs_P // K, jnp.minimum(ids_P, E - 1)
            score_P = triton.load(before["scores"].at[at_P], mask=is_real_P, other=0.0)
            score_P = jnp.where(score_P == score_P, score_P, jnp.inf)
            score_PP = jnp.where(is_same_PP, score_P[None], -jnp.inf)
            urgency_P = jnp.max(score_PP, axis=1)
            sooner_PP = urgency_P[None] > urgency_P[:, None]
            is_tie_PP = urgency_P[None] == urgency_P[:, None]
            sooner_PP |= is_tie_PP & (ids_P[None] < ids_P[:, None])
        comes_1P = jnp.broadcast_to(comes_P[None], is_same_PP.shape)
        miss_P = _count(comes_1P & sooner_PP)
        misses = jnp.sum(comes_P.astype(jnp.int32))
        chosen = jnp.sum(is_first_P.astype(jnp.int32))

        # The slots: what this layer wants and what is another layer's stays.
        slots_S = jnp.arange(width, dtype=jnp.int32)
        is_slot_S = slots_S < S
        key_S = triton.load(before["key_S"].at[slots_S], mask=is_slot_S, other=-1)
        owner_S = triton.load(before["owner"].at[slots_S], mask=is_slot_S, other=L)
        is_empty_S = key_S < 0
        known_S = jnp.where(is_empty_S, B - 1, key_S)
        last_S = triton.load(before["last_B"].at[known_S])
        last_S = jnp.where(is_empty_S, -2, last_S)
        is_free_S = is_slot_S & ((owner_S < 0) | (owner_S == layer))
        value = None
        if value_S is not None:
            value = triton.load(before["value"].at[slots_S], mask=is_slot_S, other=0.0)
            value = jnp.where(is_empty_S, -jnp.inf, value)

        def keep(pair, is_free_S):
            expert = before["ids"][pair]
            key = jnp.where(expert < E, layer * E + expert, -2)
            return is_free_S & (key_S != key)

        is_free_S = lax.fori_loop(0, P, keep, is_free_S)

        def give(miss, carry):
            is_free_S, new_P, evictions = carry
            is_best_S = is_free_S
            if value is not None:
                least = jnp.min(jnp.where(is_best_S, value, jnp.inf))
                is_best_S &= value <= least
            oldest = jnp.min(jnp.where(is_best_S, last_S, NEVER))
            is_best_S &= last_S <= oldest
            slot = jnp.min(jnp.where(is_best_S, slots_S, S - 1))
            is_here_S = slots_S == slot
            old = jnp.max(jnp.where(is_here_S, key_S, -1))
            is_now_P = is_miss_P & (miss_P == miss)
            key = jnp.max(jnp.where(is_now_P, key_P, 0))
            slot_ref[jnp.where(old < 0, B - 1, old)] = jnp.int32(-1)
            slot_ref[key] = slot
            key_ref[slot] = key
            last_ref[key] = now + 1
            new_P = jnp.where(is_now_P, slot, new_P)
            gone = (old >= 0).astype(jnp.int32)
            return is_free_S & ~is_here_S, new_P, evictions + gone

        carry = is_free_S, slot_P, jnp.int32(0)
        _, slot_P, evictions = lax.fori_loop(0, misses, give, carry)

        if clock is None:
            now_P = jnp.full_like(ids_P, 1) * now
            at_P = last_ref.at[key_P]
            triton.store(at_P, now_P, mask=is_real_P & ~is_miss_P)
            # Padding is a use of the spare block.
            padding = jnp.sum((is_pair_P & ~is_real_P).astype(jnp.int32))
            spare = jnp.int32(B - 1)
            last_ref[spare] = jnp.where(padding > 0, now, before["last_B"][spare])
        found = (chosen - misses, misses) if is_use else (0, 0)
        for column, more in enumerate((*found, evictions)):
            at = layer, jnp.int32(column)
            counts_ref[at] = before["counts_L3"][at] + more

        # Blocks of rows, those of absent experts first.
        earlier_P = _count(comes_1P & is_before_PP)
        block_P = jnp.where(comes_P, earlier_P, misses + pairs_P - earlier_P)
        row_P = _count(ids_P[None] < ids_P[:, None])
        for ref, array_P in (
            (rows.record_B, jnp.where(is_first_P, slot_P, 0)),
            (rows.row_B, row_P),
            (rows.count_B, jnp.where(is_first_P, _count(is_same_PP), 0)),
            (rows.host_B, jnp.where(comes_P, ids_P, -1)),
        ):
            triton.store(ref.at[block_P], array_P, mask=is_pair_P)
        place_P = row_P + _count(is_same_PP & is_before_PP)
        triton.store(rows.pair_P.at[place_P], pairs_P, mask=is_pair_P)

    warps = 4 if max(width, lanes**2 // 16) <= 512 else 8 if width <= 4096 else 16
    found = pl.pallas_call(
        kernel,
        out_shape=outs,
        grid=(1,),
        input_output_aliases={first + place: place for place in range(len(tables))},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=is_interpreted(),
        name="moe_edge_look_up",
    )(*given.values())
    return Tables(*found[: len(tables)]), Rows(*found[len(tables) :])


def _count(is_it_PP) -> jax.Array:
    """How many of each row."""
    return jnp.sum(is_it_PP.astype(jnp.int32), axis=1)
