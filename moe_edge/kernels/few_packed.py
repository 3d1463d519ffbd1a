"""Rows times experts' weights in blocks of few bits, which are decoded in registers.

A program takes one eight of rows (`eights`): a thread takes words of all of them,
so loads are of 16 bytes (of mxfp4, whose eights of blocks are 136 bytes, of 8) and what
it reads of x serves eight weights. Codes are multiplied and summed in float32 over a
word, then meet their scale.

Rows of x are taken by one, two or four, whose sums have one order. Beyond four the
weights are read again, from the device's caches. What comes from the host is first
copied whole into its slot by the program that needs it, in runs that the link likes.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import eights
from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels.eights import EIGHT, FORMATS, Format, eight_words
from moe_edge.kernels.few_work import Tile, Work

MOST_ROWS = 4  # that meet weights read once
HELD_BYTES = 288  # of weights by a thread, in its registers
MOST_WARPS = 16
ONE_BODY = True  # weights from the host are copied first, then as all others


def tile_of(kind: str, width: int, matrices: int) -> Tile:
    """Warps for eights of rows of so many weights, of one or two matrices."""
    held = 4 * eight_words(kind, width) * matrices / (32 * HELD_BYTES)
    return Tile(EIGHT, min(pl.next_power_of_2(math.ceil(held)), MOST_WARPS))


def as_words(records_SR: jax.Array) -> jax.Array:
    """Records in bytes as int32 words, without a copy on a GPU."""
    S, R = records_SR.shape
    return lax.bitcast_convert_type(records_SR.reshape(S, R // 4, 4), jnp.int32)


def as_bytes(words_SR: jax.Array) -> jax.Array:
    """What `as_words` made these of."""
    return lax.bitcast_convert_type(words_SR, jnp.uint8).reshape(len(words_SR), -1)


def compute(work: Work, slot, host, row, count, number, from_host) -> None:
    """The eight outputs `number` of a block's rows: see `few_floats.compute`.

    Args:
      from_host: bool, may be traced.
    """
    if host is not None:
        pl.when(from_host)(lambda: _bring(work, slot, host, number))
    if count is None:
        _multiply(work, slot, row, 0, 1, 1, number)
        return

    def take(turn, carry):
        first = turn * MOST_ROWS
        given = count, number
        rest = count - first
        for is_it, rows in ((rest == 1, 1), (rest == 2, 2), (rest > 2, MOST_ROWS)):
            pl.when(is_it)(lambda n=rows: _multiply(work, slot, row, first, n, *given))
        return carry

    lax.fori_loop(0, (count + MOST_ROWS - 1) // MOST_ROWS, take, 0)


def _bring(work: Work, slot, host, number) -> None:
    """Copies an eight of each matrix, and its biases, from the host into the slot."""
    lanes, size = 32 * work.tile.warps, eight_words(work.kind, work.width)
    spans = [(first + number * size, size) for first in work.firsts]
    spans += [
        (first + number * EIGHT, EIGHT) for first in work.biases if first is not None
    ]
    found = []
    for start, count in spans:
        step = min(4 * lanes, pl.next_power_of_2(count))
        for begin in range(0, count, step):
            inside = begin + jnp.arange(step, dtype=jnp.int32)
            is_in, at = inside < count, start + inside
            there = work.refs["host"].at[jnp.full_like(at, host), at]
            found.append((at, is_in, triton.load(there, mask=is_in, other=0)))
    slots = work.refs["slots"]
    for at, is_in, words in found:
        if rows_kernels.is_interpreted():
            # Masked lanes write what was there: not over the others.
            at = jnp.where(is_in, at, slots.shape[1])
        triton.store(slots.at[jnp.full_like(at, slot), at], words, mask=is_in)
    if not rows_kernels.is_interpreted():
        triton.debug_barrier()  # other threads of the program read it


def _multiply(work: Work, slot, row, first, rows: int, count, number) -> None:
    """Products of `rows` rows from `first` on; the last one again where they end."""
    refs, kind, form = work.refs, work.kind, FORMATS[work.kind]
    size, parts = eight_words(kind, work.width), EIGHT // form.rows

    def load(at):
        at, mask = at
        return triton.load(
            refs["slots"].at[jnp.full_like(at, slot), at], mask=mask, other=0
        )

    def run(at_L1, size, known_L1):
        at = at_L1 + jnp.arange(size, dtype=jnp.int32)[None]
        return at, jnp.broadcast_to(known_L1, at.shape)

    turns = [*eights.places(kind, work.width, 32 * work.tile.warps)]
    held = []  # all are asked for before the first is used
    for scale_L1, code_L1, _, known_L1 in turns:
        for start in (begin + number * size for begin in work.firsts):
            scales, codes = (
                [
                    load(run(start + at_L1 + each, form.rows, known_L1))
                    for each in range(0, size, form.rows)
                ]
                for at_L1, size in ((scale_L1, form.scale_words), (code_L1, EIGHT))
            )
            held.append((_apart(scales), codes))
    pairs = [work.pair(row, jnp.minimum(first + i, count - 1)) for i in range(rows)]
    totals = [[[0.0] * parts for _ in work.firsts] for _ in pairs]
    for turn, (_, _, column_L1, known_L1) in enumerate(turns):
        met = [
            _columns(refs["x"], form, pair[1], column_L1, known_L1) for pair in pairs
        ]
        for matrix in range(len(work.firsts)):
            scales, codes = held[turn * len(work.firsts) + matrix]
            for part, words in enumerate(codes):
                scale = eights.scales(kind, scales, part)
                values = eights.decode(kind, words)
                wrong = eights.wrong(kind, words)
                for total, xs in zip(totals, met, strict=True):
                    sums = jnp.zeros(words.shape, jnp.float32)
                    for value, x_L1 in zip(values, xs, strict=True):
                        sums = _add_product(sums, value, x_L1)
                    if wrong is not None:
                        sums = jnp.where(wrong, jnp.float32(jnp.nan), sums)
                    total[matrix][part] += sums * scale
    for (pair, _), total in zip(pairs, totals, strict=True):
        for part in range(parts):
            outs = number * EIGHT + part * form.rows
            outs += jnp.arange(form.rows, dtype=jnp.int32)
            sums = [_over_lanes(one[part]) for one in total]
            if work.biases[0] is not None:
                given = ((first + outs, outs >= 0) for first in work.biases)
                biases = [
                    lax.bitcast_convert_type(load(at), jnp.float32) for at in given
                ]
                sums = [a + b for a, b in zip(sums, biases, strict=True)]
            work.finish(pair, sums, outs, outs >= 0)


def _over_lanes(sums_LN):
    """Sums of the lanes, by halves: a power of two of them.

    Interpreted, a reduction has another order in each fusion of XLA:CPU, so a row's
    bits depended on how many rows there were.
    """
    if not rows_kernels.is_interpreted():
        return jnp.sum(sums_LN, axis=0)
    while (half := len(sums_LN) // 2) > 0:
        sums_LN = sums_LN[:half] + sums_LN[half:]
    return sums_LN[0]


def _columns(x_ref, form: Format, source, column_L1, known_L1) -> list:
    """What a word's codes meet, float32 `[lanes, 1]` each."""
    found = []
    for half in range(8 // form.bits):
        at = column_L1 + half * form.block // 2 + jnp.arange(4, dtype=jnp.int32)[None]
        x_ref_here = x_ref.at[jnp.full_like(at, source), at]
        mask = jnp.broadcast_to(known_L1, at.shape)
        found.append(triton.load(x_ref_here, mask=mask, other=0.0))
    return _apart(found)


def _apart(tiles: list) -> list:
    """The columns `[lanes, 1]` of some tiles."""
    return [column for x in tiles for column in lax.split(x, (1,) * x.shape[1], axis=1)]


def _add_product(sums, value, x_L1):
    """`sums + value * x_L1`, on a GPU with one rounding, which takes half as long."""
    x = jnp.broadcast_to(x_L1, sums.shape)
    if rows_kernels.is_interpreted():
        return sums + value * x
    (found,) = triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[value, x, sums],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(sums.shape, jnp.float32)],
    )
    return found
