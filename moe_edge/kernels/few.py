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

from moe_edge.model.record import RecordLayout


class Blocks(NamedTuple):
    """The rows of each expert, int32 `[B]` each; absent experts first."""

    record_B: jax.Array  # its slot
    row_B: jax.Array  # its first row among the sorted ones
    count_B: jax.Array  # its rows; 0 leaves it out
    host_B: jax.Array  # its record in the host's memory; -1: the slot holds it


class Tile(NamedTuple):
    """What a program of the kernel takes at once."""

    outputs: int  # power of two
    warps: int


WEIGHTS = 64  # held by a thread, of one or two matrices
MISS_PROGRAMS = 64  # that share what comes over the link


def tile_of(width: int, matrices: int, itemsize: int) -> Tile:
    """Outputs and warps for rows of so many weights, of one or two matrices."""
    warps, row = 4, pl.next_power_of_2(width) * matrices * itemsize // 2
    outputs = max(1, 2 * WEIGHTS * 32 * warps // row)
    return Tile(min(outputs, 16), warps)


def ffn(
    x_TD: jax.Array,
    slots_SR: jax.Array,
    blocks: Blocks,
    layout: RecordLayout,
    act: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    source_P: jax.Array,
    scale_P: jax.Array | None = None,
    host_ER: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of sorted (token, expert) pairs, a row each.

    Args:
      x_TD: float32.
      slots_SR: records, float32 or bfloat16; donated where there is `host_ER`.
      blocks: of the sorted rows.
      act: combines gate and up, element by element; what Triton has.
      source_P: int32, the row of x of each sorted row.
      scale_P: float32, a factor of each sorted row; None: 1.
      host_ER: records in pinned host memory.
    Returns:
      (float32 `[P, D]`, of which rows in no block are arbitrary; the slots).
    """
    P, parts = source_P.size, layout.offsets
    # The experts of one token are all different: a row each.
    common = {"single": x_TD.shape[0] == 1, "host_ER": host_ER}
    mid_PF, slots_SR = _product(
        x_TD,
        slots_SR,
        blocks,
        (parts["gate"], parts["up"]),
        (parts.get("gate_bias"), parts.get("up_bias")),
        (P, layout.expert_dim),
        combine=act,
        source_P=source_P,
        **common,
    )
    return _product(
        mid_PF,
        slots_SR,
        blocks,
        (parts["down"],),
        (parts.get("down_bias"),),
        (P, layout.d_model),
        scale_P=scale_P,
        **common,
    )


def _product(
    x_TI,
    slots_SR,
    blocks,
    firsts,
    biases,
    shape,
    *,
    single,
    combine=None,
    source_P=None,
    scale_P=None,
    host_ER=None,
    tile=None,
):
    """One launch: rows times one matrix, or two that `combine` makes one of."""
    width, outputs = x_TI.shape[1], shape[1]
    tile = tile or tile_of(width, len(firsts), slots_SR.dtype.itemsize)
    tiles, B = pl.cdiv(outputs, tile.outputs), blocks.row_B.size
    given = {"blocks": jnp.stack(blocks), "x": x_TI, "slots": slots_SR}
    given |= {"source": source_P, "scale": scale_P, "host": host_ER}
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
        part = _Part(refs, firsts, biases, combine, tile, width, single)
        number = pl.program_id(0)
        if not misses:
            part.run(number // tiles, number % tiles, from_host=False)
            return

        @pl.when(number < misses)
        def _():
            ids_C = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
            at_3 = jnp.full(ids_C.shape, 3, jnp.int32), jnp.minimum(ids_C, B - 1)
            host_C = triton.load(refs["blocks"].at[at_3])
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
        interpret=jax.default_backend() != "gpu",  # tests
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
    single: bool  # each block has one row

    def run(self, block, number, from_host: bool) -> None:
        """Some outputs of a block's rows."""
        refs, zero = self.refs, jnp.int32(0)
        slot, row, count, host = (refs["blocks"][part, block] for part in range(4))
        wanted = count > 0
        if "host" in refs and not from_host:
            wanted &= host < 0
        outputs, T = refs["out"].shape[1], refs["x"].shape[0]

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
                at = row + index
                source = refs["source"][at] if "source" in refs else at
                source = zero if T == 1 else source
                x_ref = refs["x"].at[
                    jnp.broadcast_to(source, columns_W.shape), columns_W
                ]
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
                    out_N *= refs["scale"][at]
                where_N = jnp.broadcast_to(at, outs_N.shape), outs_N
                triton.store(refs["out"].at[where_N], out_N, mask=is_out_N)
                return carry

            if self.single:
                add_row(zero, zero)
            else:
                lax.fori_loop(zero, count, add_row, zero)

    def _load(self, slot, host, at, mask, from_host: bool):
        """Weights of the record; those from the host stay in its slot."""
        refs = self.refs
        full = jnp.broadcast_to(slot, at.shape)
        if not from_host:
            return triton.load(refs["slots"].at[full, at], mask=mask, other=0.0)
        there = refs["host"].at[jnp.broadcast_to(host, at.shape), at]
        found = triton.load(there, mask=mask, other=0.0)
        triton.store(refs["slots"].at[full, at], found, mask=mask)
        return found
