"""FFNs of a few rows an expert on a GPU, at the speed at which weights are read.

The matrix units want sixteen rows; one row padded to sixteen takes several times as
long as its weights' bytes. Here a program of the kernel (Pallas on Triton) takes a few
outputs of one expert: it loads their whole rows of weights at once, widens them in
registers, and multiplies and sums in float32 on the ordinary units, row by row of x, so
each weight is read once and products are exact (`few_floats`; of weights in blocks of
few bits `few_packed`). Two launches a layer: gate, up and the activation; then down
with the pairs' factors.

The bits of a row depend neither on the other rows nor on their number: all rows go
through the same sums in the same order.

`few_cuda` is the same in CUDA, where MOE_EDGE_FEW_ROWS says so; it was never timed.

An expert that is in no slot is read where it lies, in the host's pinned memory, over
the link, and is written into its slot in passing (`host_ER`). Some programs take all of
those in turn while the others compute what the slots hold.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import few_cuda, few_floats, few_packed, switches
from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels.few_work import Work

VARIABLE = "MOE_EDGE_FEW_ROWS"
FORMS = (*switches.OFF_ON, "cuda")  # none, Triton's, ours
MISS_PROGRAMS = 64  # that share what comes over the link


def is_wanted(act: Callable) -> bool:
    """Whether few rows meet experts by this kernel; see `is_asked`."""
    return is_asked() and takes(act.keywords.get("kind"))


def takes(activation: str | None) -> bool:
    """Whether the kernel has an activation: Triton has no `erf`."""
    return activation != "gelu" or form() == "cuda"


def is_asked() -> bool:
    """Unless MOE_EDGE_FEW_ROWS is 0; see `form`."""
    return form() != "0"


def form() -> str:
    """Of the kernel: what MOE_EDGE_FEW_ROWS says.

    Raises:
      ConfigError: none of `FORMS`.
    """
    return switches.chosen(VARIABLE, FORMS, "1")


def check(kind: str | None) -> None:
    """Before a model is read, whose experts are of that kind of blocks.

    Raises:
      ConfigError: what is asked for is not known; `few_cuda.check`.
    """
    if form() == "cuda":
        few_cuda.check(kind)


def describe() -> str:
    """How few rows meet experts on a GPU, for people."""
    ways = {"0": "as many", "1": "exact", "cuda": "exact, by our own CUDA"}
    return f"few rows of an expert {ways[form()]}"


class Rows(NamedTuple):
    """The rows of each record, int32 `[B]` each; `plan` makes them.

    A None field says what one token needs, whose experts are all different: block b is
    row b, and `record_B` with what is no record leaves it out.
    """

    record_B: jax.Array  # slot that holds the weights, or takes them from the host
    row_B: jax.Array | None = None  # its first row among those in order of record
    count_B: jax.Array | None = None  # its rows; 0 leaves it out
    # Its record in the host's memory, -1: the slot holds it; None: slots hold all.
    host_B: jax.Array | None = None
    pair_P: jax.Array | None = None  # the (token, expert) pair of each row


def plan(record_TK: jax.Array, records: int, host_TK: jax.Array | None = None) -> Rows:
    """The rows of each record together, however many.

    Args:
      record_TK: int32, what each token's experts are; `records` and above means none.
      host_TK: int32, the record in the host's memory that the pair's slot is to get;
        -1: the slot holds it. None: all do.
    Returns:
      a block for each pair that is the first of its record, absent ones first, the
      others empty.
    """
    record_P, P = record_TK.reshape(-1), record_TK.size
    if record_TK.shape[0] == 1 and host_TK is None:
        return Rows(record_P)
    numbers_P = jnp.arange(P, dtype=jnp.int32)
    same_PP = record_P[:, None] == record_P[None]
    is_before_PP = record_P[None] < record_P[:, None]
    is_earlier_PP = same_PP & (numbers_P[None] < numbers_P[:, None])
    is_first_P = ~jnp.any(is_earlier_PP, axis=1) & (record_P < records)
    count_P = jnp.where(is_first_P, jnp.sum(same_PP, axis=1, dtype=jnp.int32), 0)
    before_P = jnp.sum(is_before_PP, axis=1, dtype=jnp.int32)
    place_P = before_P + jnp.sum(is_earlier_PP, axis=1, dtype=jnp.int32)
    slot_P = jnp.where(is_first_P, record_P, 0)
    blocks = [slot_P, before_P, count_P]
    if host_TK is not None:
        is_absent_P = is_first_P & (host_TK.reshape(-1) >= 0)
        blocks.append(jnp.where(is_absent_P, host_TK.reshape(-1), -1))
        # A pair's key: absent ones before the others, else in this order.
        key_P = numbers_P + jnp.where(is_absent_P, 0, P)
        new_P = jnp.sum(key_P[None] < key_P[:, None], axis=1, dtype=jnp.int32)
        blocks = [_placed(array_P, new_P) for array_P in blocks]
    return Rows(*blocks, pair_P=_placed(numbers_P, place_P))


def _placed(array_P, place_P):
    """Each element at its place, by comparing: a scatter is a kernel of its own."""
    numbers_P = jnp.arange(place_P.size, dtype=jnp.int32)
    is_here_PP = place_P[None] == numbers_P[:, None]
    found_P = jnp.sum(jnp.where(is_here_PP, array_P[None], 0), axis=1)
    return found_P.astype(jnp.int32)


def ffn(
    x_TD: jax.Array,
    slots_SR: jax.Array,
    rows: Rows,
    top_k: int,
    layout,
    act: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    scale_P: jax.Array | None = None,
    host_ER: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of (token, expert) pairs, token by token in order of rank.

    Args:
      x_TD: float32.
      slots_SR: records, float32, bfloat16 or in blocks; donated where there is
        `host_ER`.
      rows: of `plan`, those of absent experts (`host_B`) first.
      top_k: K, pairs of a token.
      layout: of the records, a `RecordLayout`.
      act: combines gate and up, element by element; what Triton has.
      scale_P: float32, a factor of each pair; None: 1.
      host_ER: records in pinned host memory.
    Returns:
      (float32 `[P, D]`, arbitrary for pairs that were left out; the slots).
    """
    P, parts, kind = x_TD.shape[0] * top_k, layout.offsets, layout.kind
    product = few_cuda.product if form() == "cuda" else _product
    if kind is not None and product is _product:  # places in words
        parts = {name: first // 4 for name, first in parts.items()}
        slots_SR = few_packed.as_words(slots_SR)
        host_ER = None if host_ER is None else few_packed.as_words(host_ER)
    mid_PF, slots_SR = product(
        *(x_TD, slots_SR, rows, top_k),
        (parts["gate"], parts["up"]),
        (parts.get("gate_bias"), parts.get("up_bias")),
        (P, layout.expert_dim),
        kind=kind,
        combine=act,
        host_ER=host_ER,
    )
    y_PD, slots_SR = product(
        *(mid_PF, slots_SR, rows, top_k),
        (parts["down"],),
        (parts.get("down_bias"),),
        (P, layout.d_model),
        kind=kind,
        scale_P=scale_P,
        host_ER=host_ER,
    )
    return y_PD, slots_SR if kind is None else few_packed.as_bytes(slots_SR)


def _product(
    x_NI,
    slots_SR,
    rows,
    top_k,
    firsts,
    biases,
    shape,
    *,
    kind=None,
    combine=None,
    scale_P=None,
    host_ER=None,
):
    """One launch: rows times one matrix, or two that `combine` makes one of."""
    width, outputs = x_NI.shape[1], shape[1]
    if kind is None:
        form = few_floats
        tile = form.tile_of(width, len(firsts), slots_SR.dtype.itemsize)
    else:
        form = few_packed
        tile = form.tile_of(kind, width, len(firsts))
    tiles, B = pl.cdiv(outputs, tile.outputs), rows.record_B.size
    given = {"x": x_NI, "slots": slots_SR, "scale": scale_P, "host": host_ER}
    given |= rows._asdict()
    given = {name: array for name, array in given.items() if array is not None}
    out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    aliases, misses, names = {}, 0, [*given, "out"]
    if host_ER is not None:
        # Read and written through the output alone: XLA copies what two arguments name.
        names[names.index("slots")] = "unread"
        names.append("slots")
        aliases, misses = {list(given).index("slots"): 1}, MISS_PROGRAMS
        out_shape.append(jax.ShapeDtypeStruct(slots_SR.shape, slots_SR.dtype))

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        work = Work(refs, firsts, biases, combine, tile, width, top_k, kind)
        run = functools.partial(_run, work, form.compute)
        number = pl.program_id(0)
        if not misses:
            run(number // tiles, number % tiles, from_host=False)
            return

        def take(turn, carry, is_absent):
            place = number - misses
            place = jnp.where(is_absent, number + turn * misses, place)
            run(place // tiles, place % tiles, from_host=is_absent)
            return carry

        def rounds():
            """Of a program that takes what is absent."""
            ids_C = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
            host_C = triton.load(refs["host_B"].at[jnp.minimum(ids_C, B - 1)])
            absent = jnp.sum(((host_C >= 0) & (ids_C < B)).astype(jnp.int32))
            return (absent * tiles - number + misses - 1) // misses

        if form.ONE_BODY:
            is_absent = number < misses
            take = functools.partial(take, is_absent=is_absent)
            lax.fori_loop(0, jnp.where(is_absent, rounds(), 1), take, jnp.int32(0))
            return

        @pl.when(number < misses)
        def _():
            absent = functools.partial(take, is_absent=True)
            lax.fori_loop(0, rounds(), absent, jnp.int32(0))

        @pl.when(number >= misses)
        def _():
            take(0, 0, is_absent=False)

    found = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(misses + tiles * B,),
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=rows_kernels.is_interpreted(),
        name="moe_edge_few",
    )(*given.values())
    return found[0], found[1] if host_ER is not None else slots_SR


def _run(work: Work, compute, block, number, from_host) -> None:
    """Some outputs of a block's rows, if these programs are to make them.

    Args:
      from_host: whether they take what is absent: bool, or traced with `ONE_BODY`.
    """
    refs = work.refs
    slot, row, count, host = refs["record_B"][block], block, None, None
    if "row_B" in refs:
        row, count = refs["row_B"][block], refs["count_B"][block]
        wanted = count > 0
    else:  # one token, whose experts are all different
        wanted = (slot >= 0) & (slot < refs["slots"].shape[0])
    if "host" in refs:
        host = refs["host_B"][block]
        wanted &= jnp.bool_(from_host) | (host < 0)

    @pl.when(wanted)
    def _():
        compute(work, slot, host, row, count, number, from_host)
