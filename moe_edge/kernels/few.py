"""FFNs of a few rows an expert on a GPU, at the speed at which weights are read.

The matrix units want sixteen rows; one row padded to sixteen takes several times as
long as its weights' bytes. Here a program of the kernel (Pallas on Triton) takes a few
outputs of one expert: it loads their whole rows of weights at once, widens them in
registers, and multiplies and sums in float32 on the ordinary units, row by row of x, so
each weight is read once and products are exact. Two launches a layer: gate, up and the
activation; then down with the pairs' factors.

The bits of a row depend neither on the other rows nor on their number: all rows go
through the same sums in the same order.

An expert that is in no slot is read where it lies, in the host's pinned memory, over
the link, and is written into its slot in passing (`host_ER`). Some programs take all of
those in turn while the others compute what the slots hold.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels import switches


class Tile(NamedTuple):
    """What a program of the kernel takes at once."""

    outputs: int  # power of two
    warps: int


VARIABLE = "MOE_EDGE_FEW_ROWS"
HELD_BYTES = 256  # of weights by a thread, in its registers
MISS_PROGRAMS = 64  # that share what comes over the link


def is_wanted(act: Callable) -> bool:
    """Whether few rows meet experts by this kernel; see `is_asked`."""
    is_exact_gelu = act.keywords.get("kind") == "gelu"  # Triton has no `erf`
    return is_asked() and not is_exact_gelu


def is_asked() -> bool:
    """Unless MOE_EDGE_FEW_ROWS is 0.

    Raises:
      ConfigError: another value than 0 or 1.
    """
    return switches.chosen(VARIABLE, switches.OFF_ON, "1") == "1"


def describe() -> str:
    """How few rows meet experts on a GPU, for people."""
    return f"few rows of an expert {'exact' if is_asked() else 'as many'}"


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


def tile_of(width: int, matrices: int, itemsize: int) -> Tile:
    """Outputs and warps for rows of so many weights, of one or two matrices.

    One warp sums without waiting for others, as long as its threads can hold a row: on
    an H200 gate and up of 2048 take 14.4 us of six experts so, 16.5 by four warps.
    """
    row = pl.next_power_of_2(width) * matrices
    most = 32 * HELD_BYTES // itemsize  # of a warp
    warps = min(max(1, row // most), 8)
    return Tile(min(max(1, warps * most // row), 16), warps)


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
      slots_SR: records, float32 or bfloat16; donated where there is `host_ER`.
      rows: of `plan`, those of absent experts (`host_B`) first.
      top_k: K, pairs of a token.
      layout: of the records, a `RecordLayout`.
      act: combines gate and up, element by element; what Triton has.
      scale_P: float32, a factor of each pair; None: 1.
      host_ER: records in pinned host memory.
    Returns:
      (float32 `[P, D]`, arbitrary for pairs that were left out; the slots).
    """
    P, parts = x_TD.shape[0] * top_k, layout.offsets
    mid_PF, slots_SR = _product(
        *(x_TD, slots_SR, rows, top_k),
        (parts["gate"], parts["up"]),
        (parts.get("gate_bias"), parts.get("up_bias")),
        (P, layout.expert_dim),
        combine=act,
        host_ER=host_ER,
    )
    return _product(
        *(mid_PF, slots_SR, rows, top_k),
        (parts["down"],),
        (parts.get("down_bias"),),
        (P, layout.d_model),
        scale_P=scale_P,
        host_ER=host_ER,
    )


def _product(
    x_NI,
    slots_SR,
    rows,
    top_k,
    firsts,
    biases,
    shape,
    *,
    combine=None,
    scale_P=None,
    host_ER=None,
    tile=None,
):
    """One launch: rows times one matrix, or two that `combine` makes one of."""
    width, outputs = x_NI.shape[1], shape[1]
    tile = tile or tile_of(width, len(firsts), slots_SR.dtype.itemsize)
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
        part = _Part(refs, firsts, biases, combine, tile, width, top_k)
        number = pl.program_id(0)
        if not misses:
            part.run(number // tiles, number % tiles, from_host=False)
            return

        @pl.when(number < misses)
        def _():
            ids_C = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
            host_C = triton.load(refs["host_B"].at[jnp.minimum(ids_C, B - 1)])
            absent = jnp.sum(((host_C >= 0) & (ids_C < B)).astype(jnp.int32))
            rounds = (absent * tiles - number + misses - 1) // misses

            def take(turn, carry):
                work = number + turn * misses
                part.run(work // tiles, work % tiles, from_host=True)
                return carry

            lax.fori_loop(0, rounds, take, jnp.int32(0))

        @pl.when(number >= misses)
        def _():
            work = number - misses
            part.run(work // tiles, work % tiles, from_host=False)

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


class _Part(NamedTuple):
    """What a program of the kernel knows."""

    refs: dict
    firsts: tuple[int, ...]
    biases: tuple[int | None, ...]
    combine: Callable | None
    tile: Tile
    width: int
    top_k: int

    def run(self, block, number, from_host: bool) -> None:
        """Some outputs of a block's rows."""
        refs = self.refs
        slot, row, host = refs["record_B"][block], block, None
        if "row_B" in refs:
            row, count = refs["row_B"][block], refs["count_B"][block]
            wanted = count > 0
        else:
            wanted = (slot >= 0) & (slot < refs["slots"].shape[0])
        if "host" in refs:
            host = refs["host_B"][block]
            wanted &= True if from_host else host < 0
        (P, outputs), sources = refs["out"].shape, refs["x"].shape[0]

        @pl.when(wanted)
        def _():
            outs_N = number * self.tile.outputs
            outs_N += jnp.arange(self.tile.outputs, dtype=jnp.int32)
            is_out_N = outs_N < outputs
            known_N = jnp.where(is_out_N, outs_N, 0)
            columns_W = jnp.arange(pl.next_power_of_2(self.width), dtype=jnp.int32)
            is_in_W = columns_W < self.width
            shape_NW = self.tile.outputs, columns_W.size
            known_NW = jnp.broadcast_to(is_out_N[:, None] & is_in_W[None], shape_NW)
            weights = []
            for first in self.firsts:
                at_NW = (first + known_N * self.width)[:, None] + columns_W[None]
                weights.append(self._load(slot, host, at_NW, known_NW, from_host))
            extra = []
            for first in self.biases:
                if first is not None:
                    given = first + known_N, is_out_N, from_host
                    bias_N = self._load(slot, host, *given)
                    extra.append(bias_N.astype(jnp.float32))

            def add_row(index, carry):
                pair = row + index
                if "pair_P" in refs:
                    pair = refs["pair_P"][pair]
                source = pair if sources == P else pair // self.top_k
                x_ref = refs["x"].at[jnp.full_like(columns_W, source), columns_W]
                x_W = triton.load(x_ref, mask=is_in_W, other=0.0)
                sums = [
                    jnp.sum(weight_NW.astype(jnp.float32) * x_W[None], axis=1)
                    for weight_NW in weights
                ]
                sums = (
                    [a + b for a, b in zip(sums, extra, strict=True)] if extra else sums
                )
                out_N = self.combine(*sums) if self.combine is not None else sums[0]
                if "scale" in refs:
                    out_N *= refs["scale"][pair]
                where_N = jnp.full_like(outs_N, pair), outs_N
                triton.store(refs["out"].at[where_N], out_N, mask=is_out_N)
                return carry

            if "count_B" not in refs:  # one token, whose experts are all different
                add_row(0, 0)
            else:
                lax.fori_loop(0, count, add_row, 0)

    def _load(self, slot, host, at, mask, from_host: bool):
        """Weights of the record; those from the host stay in its slot."""
        refs = self.refs
        full = jnp.full_like(at, slot)
        if not from_host:
            return triton.load(refs["slots"].at[full, at], mask=mask, other=0.0)
        there = refs["host"].at[jnp.full_like(at, host), at]
        found = triton.load(there, mask=mask, other=0.0)
        if (
            rows_kernels.is_interpreted()
        ):  # masked lanes write what was there: not over the others
            at = jnp.where(mask, at, refs["slots"].shape[1])
        triton.store(refs["slots"].at[full, at], found, mask=mask)
        return found
