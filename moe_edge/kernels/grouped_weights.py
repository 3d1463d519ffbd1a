"""Tiles of experts' weights for the matrix units, however records store them.

Of weights in blocks of few bits (`eights`) a tile is decoded in registers to bfloat16,
exactly: codes have at most 8 significant bits. Their scales meet the float32 sums of
each block. So weights are never rounded, and what rounds is what rounds where weights
are bfloat16 themselves: rows, unless they are cut into three parts (`grouped.split`).

A thread reads words of four rows of an eight, which are neighbours, so loads are of 16
bytes (of mxfp4 of 8); a word's codes become neighbours in its own registers.
"""

import math
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
    dtypes = {"records": jnp.int32, "scales": _SCALES[kind]}
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
      shape: outputs and inputs.
      inputs: taken at once, a power of two.
    """

    def __init__(self, refs: dict, kind: str | None, first: int, shape, inputs: int):
        self._refs, self._kind, self._first, self.shape = refs, kind, first, shape
        self._inputs, self.turns = inputs, pl.cdiv(shape[1], inputs)
        if kind is not None:
            block = FORMATS[kind].block
            blocks = shape[1] // block
            # In a turn, of which none is cut off.
            self._at_once = math.gcd(blocks, max(1, inputs // block))
            self.turns = blocks // self._at_once

    def scales(self, turn, record, out_N) -> tuple[jax.Array, ...]:
        """What a turn's blocks have as scales, `[N]` each; of a turn after the last
        those of the last. To be asked for a turn ahead: a kernel waits for them."""
        if self._kind is None:
            return ()
        form = FORMATS[self._kind]
        apart = 4 * form.words // form.scale_bytes  # from block to block
        eight_N, inside_N = self._eight(out_N)
        block = jnp.minimum(turn, self.turns - 1) * self._at_once
        at_N = self._first // form.scale_bytes + eight_N * apart + inside_N
        there = [at_N + (block + each) * apart for each in range(self._at_once)]
        return tuple(triton.load(self._refs["scales"].at[record, N]) for N in there)

    def tiles(self, turn, record, out_N, scales) -> Iterator[Group]:
        """The weights `[N, C]` of some outputs in a turn, in groups of a scale.

        Those of outputs that the matrix has not are arbitrary.
        """
        given = turn, record, out_N
        if self._kind is None:
            return self._floats(*given)
        return self._blocks(*given, scales)

    def biases(self, record, bias: int, out_N) -> jax.Array:
        """float32 `[N]` of a record whose biases begin at `bias`."""
        out_N = self._known(out_N)
        if self._kind is None:
            there, bias_N = self._refs["records"], bias + out_N
        else:
            there, bias_N = self._refs["biases"], bias // 4 + out_N
        return triton.load(there.at[record, bias_N]).astype(jnp.float32)

    def _known(self, out_N):
        return jnp.where(out_N < self.shape[0], out_N, 0)

    def _floats(self, turn, record, out_N):
        width = self.shape[1]
        column_C = turn * self._inputs + jnp.arange(self._inputs, dtype=jnp.int32)
        at_NC = (self._first + self._known(out_N) * width)[:, None] + column_C[None]
        is_in_C, masked = None, {}
        if width % self._inputs:
            is_in_C = column_C < width
            mask_NC = jnp.broadcast_to(is_in_C[None], at_NC.shape)
            masked = {"mask": mask_NC, "other": 0.0}
        weight_NC = triton.load(self._refs["records"].at[record, at_NC], **masked)
        yield Group([Tile(column_C, weight_NC, is_in_C)], None)

    def _eight(self, out_N):
        """(blocks before each output's eight, its place there)."""
        # Not `//` and `%`, nor `where`, behind which Triton sees no neighbours.
        last, blocks = self.shape[0] // EIGHT - 1, self.shape[1]
        eight_N = jnp.minimum(lax.div(out_N, EIGHT), last)
        return eight_N * (blocks // FORMATS[self._kind].block), lax.rem(out_N, EIGHT)

    def _blocks(self, turn, record, out_N, scales):
        kind, form = self._kind, FORMATS[self._kind]
        eight_N, inside_N = self._eight(out_N)
        code_N = self._first // 4 + eight_N * form.words + form.scale_words + inside_N
        size = min(form.row_words, self._inputs // 4)  # of a row in a tile
        code_NW = code_N[:, None] + EIGHT * jnp.arange(size, dtype=jnp.int32)[None]
        loaded = []  # all are asked for before the first is used
        for inside in range(self._at_once):
            block = turn * self._at_once + inside
            for begin in range(0, form.row_words, size):
                at_NW = code_NW + (block * form.words + EIGHT * begin)
                loaded.append(triton.load(self._refs["records"].at[record, at_NW]))
        column_C, tiles = jnp.arange(4 * size, dtype=jnp.int32), form.row_words // size
        for inside, scale_N in enumerate(scales):
            first = (turn * self._at_once + inside) * form.block
            group = []
            for number, code_NW in enumerate(loaded[inside * tiles :][:tiles]):
                for half, weight_NC in enumerate(_decoded(kind, code_NW)):
                    begin = first + 4 * number * size + half * form.block // 2
                    group.append(Tile(begin + column_C, weight_NC, None))
            yield Group(group, eights.factor(kind, scale_N))


def _decoded(kind: str, code_NW) -> list[jax.Array]:
    """bfloat16 `[N, C]`: four columns of each word, of 4 bits those of both halves."""
    values = eights.decode(kind, code_NW)
    if (wrong_NW := eights.wrong(kind, code_NW)) is not None:
        values = [jnp.where(wrong_NW, jnp.float32(jnp.nan), each) for each in values]
    values = [value.astype(jnp.bfloat16) for value in values]
    return [
        _interleaved(_interleaved(a, c), _interleaved(b, d))
        for a, b, c, d in zip(*(values[place::4] for place in range(4)), strict=True)
    ]


def _interleaved(even_NW, odd_NW):
    """The columns of both in turn."""
    both_NW2 = jnp.concatenate([even_NW[..., None], odd_NW[..., None]], axis=-1)
    return both_NW2.reshape(len(even_NW), -1)
