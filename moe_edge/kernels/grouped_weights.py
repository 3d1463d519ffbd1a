"""Tiles of experts' weights for the matrix units, however records store them.

Of weights in blocks of few bits (`eights`) a tile is decoded in registers to bfloat16,
exactly: codes have at most 8 significant bits. Their scales meet the float32 sums of
each block. So weights are never rounded, and what rounds is what rounds where weights
are bfloat16 themselves: rows, unless they are cut into three parts (`grouped.split`).

A record's bytes are read as they stand: four bytes of a row, then those of the next one
of its eight. No layout of tiles follows them better, and a tile is read once for all
rows of a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import eights
from moe_edge.kernels.eights import EIGHT, FORMATS

_SCALES = {
    "q8_0x8": jnp.float16,
    "q4_0x8": jnp.float16,
    "mxfp4x8": jnp.uint8,
    "int4x8": jnp.bfloat16,
    "fp8x8": jnp.float32,
}


class Tile(NamedTuple):
    """Weights of some outputs, and the inputs that they meet."""

    column_C: jax.Array
    weight_NC: jax.Array
    is_in_C: jax.Array | None  # None: all columns are of the matrix


class Group(NamedTuple):
    """Tiles whose products have a factor in common."""

    tiles: list[Tile]
    scale_N: jax.Array | None  # None: 1


def operands(records_SR: jax.Array, kind: str | None, has_bias: bool) -> dict:
    """The arrays by name that a launch reads weights from, all of them the records."""
    if kind is None:
        return {"records": records_SR}
    codes = jnp.int8 if kind in ("q8_0x8", "q4_0x8", "int4x8") else jnp.uint8
    dtypes = {"records": codes, "scales": _SCALES[kind]}
    if has_bias:
        dtypes["biases"] = jnp.float32
    return {name: _viewed(records_SR, dtype) for name, dtype in dtypes.items()}


def _viewed(records_SR, dtype):
    """The same bytes, without a copy on a GPU."""
    S, R = records_SR.shape
    size = jnp.dtype(dtype).itemsize
    parts = (S, R // size, size) if size > 1 else (S, R)
    return lax.bitcast_convert_type(records_SR.reshape(parts), dtype)


class Weights:
    """What a program of `grouped` reads of one matrix, in turns over its inputs.

    Args:
      refs: of `operands`.
      kind: of records in blocks, see `RecordLayout`; None: they are floats.
      first: where the matrix begins in a record.
      width: its inputs.
      inputs: taken at once, a power of two.
    """

    def __init__(self, refs: dict, kind: str | None, first: int, width: int, inputs):
        self._refs, self._kind, self._first, self.width = refs, kind, first, width
        self._inputs, self.turns = inputs, pl.cdiv(width, inputs)
        if kind is not None:
            form = FORMATS[kind]
            blocks = width // form.block
            self._at_once = 1  # blocks, in a turn; no turn is cut off
            while blocks % (2 * self._at_once) == 0 and (
                2 * self._at_once * form.block <= inputs
            ):
                self._at_once *= 2
            self.turns = blocks // self._at_once

    def tiles(self, turn, record, out_N) -> Iterator[Group]:
        """The weights `[N, C]` of some outputs in a turn, in groups of a scale."""
        given = turn, record, out_N
        return self._floats(*given) if self._kind is None else self._blocks(*given)

    def biases(self, record, bias: int, out_N) -> jax.Array:
        """float32 `[N]` of a record whose biases begin at `bias`."""
        if self._kind is None:
            there, bias_N = self._refs["records"], bias + out_N
        else:
            there, bias_N = self._refs["biases"], bias // 4 + out_N
        return triton.load(there.at[record, bias_N]).astype(jnp.float32)

    def _floats(self, turn, record, out_N):
        column_C = turn * self._inputs + jnp.arange(self._inputs, dtype=jnp.int32)
        at_NC = (self._first + out_N * self.width)[:, None] + column_C[None]
        is_in_C, masked = None, {}
        if self.width % self._inputs:
            is_in_C = column_C < self.width
            mask_NC = jnp.broadcast_to(is_in_C[None], at_NC.shape)
            masked = {"mask": mask_NC, "other": 0.0}
        weight_NC = triton.load(self._refs["records"].at[record, at_NC], **masked)
        yield Group([Tile(column_C, weight_NC, is_in_C)], None)

    def _blocks(self, turn, record, out_N):
        kind, form = self._kind, FORMATS[self._kind]
        bytes_, scale = 4 * form.words, form.scale_bytes
        size = min(4 * form.row_words, self._inputs)  # bytes of a row in a tile
        eight = 4 * eights.eight_words(kind, self.width)
        start_N, inside_N = self._first + out_N // EIGHT * eight, out_N % EIGHT
        byte_C = jnp.arange(size, dtype=jnp.int32)
        code_N = start_N + EIGHT * scale + 4 * inside_N
        code_NC = code_N[:, None] + (byte_C // 4 * 4 * EIGHT + byte_C % 4)[None]
        scale_N = start_N // scale + inside_N
        records, scales = self._refs["records"], self._refs["scales"]
        begins = range(0, 4 * form.row_words, size)
        loaded = []  # all are asked for before the first is used
        for inside in range(self._at_once):
            block = turn * self._at_once + inside
            there_N = scale_N + block * (bytes_ // scale)
            there_NC = code_NC + block * bytes_
            codes = [
                triton.load(records.at[record, there_NC + EIGHT * begin])
                for begin in begins
            ]
            factor_N = triton.load(scales.at[record, there_N])
            loaded.append((block * form.block, factor_N, codes))
        for column, factor_N, codes in loaded:
            tiles = []
            for number, byte_NC in enumerate(codes):
                weights = eights.decode_bytes(kind, byte_NC)
                for half, weight_NC in enumerate(weights):
                    first = column + number * size + half * form.block // 2
                    tiles.append(Tile(first + byte_C, weight_NC, None))
            yield Group(tiles, eights.factor(kind, factor_N))
