"""A layer's look-up in the slot cache on a GPU: one Triton kernel (Pallas).

Compiled by XLA it is a dozen kernels a layer, which take longer to launch than to run.
Here one program holds the order of all slots in registers and picks a victim a miss; it
reads all that it needs of an array before it writes to it, because arrays of the
cache's state are changed in place.

What a coming layer is expected to choose is looked up likewise, in a launch of its own
or by a second program of the layer's: where each layer has its own slots, neither uses
what the other writes. A GPU may run both at once, so of the other's slots a program
may see keys old or new, and masks them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels.few import Rows
from moe_edge.kernels.lookup_programs import Sizes, expect, use
from moe_edge.kernels.rows import is_interpreted

MOST_PAIRS = 128  # which are compared with each other in registers


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
    P, sizes = T * K, _sizes(tables, E)
    given = {"ids": ids_TK.reshape(-1), "step": here.step.reshape(1)}
    given |= _numbers(layer=here.layer, first=here.first)
    given |= {} if here.clock is None else {"clock": here.clock.reshape(1)}
    given |= {"scores": scores_TE} if T > 1 else {}
    names = [f"rows.{name}" for name in Rows._fields]
    new = {name: jax.ShapeDtypeStruct((P,), jnp.int32) for name in names}
    works = [lambda refs: use(refs, sizes, T, K, has_clock=here.clock is not None)]
    widest = P
    if ahead is not None:
        M = ahead.ids_M.size
        given |= _of_ahead(ahead)
        new["plan"] = jax.ShapeDtypeStruct((2, M), jnp.int32)
        works.append(lambda refs: expect(refs, sizes, M, ahead.limit))
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
    sizes, M = _sizes(tables, experts), ahead.ids_M.size
    given = _of_ahead(ahead) | {"step": step.reshape(1)} | _of_slots(layer_S, value_S)
    new = {"plan": jax.ShapeDtypeStruct((2, M), jnp.int32)}
    works = [lambda refs: expect(refs, sizes, M, ahead.limit)]
    found = _launch(works, tables, given, new, M)
    return _tables_of(found), found["plan"]


def _sizes(tables: Tables, experts: int) -> Sizes:
    layers = tables.counts_L3.shape[0]
    return Sizes(experts, layers, tables.key_S.size, tables.last_B.size)


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
