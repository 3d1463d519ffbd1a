"""Rows times experts' weights in blocks of few bits, which are decoded in registers.

Records are those that the CPU's kernels read (`model/quantised.py`): eight rows of a
matrix stand interleaved, and of each block of their columns first the eight scales,
then from each row in turn four bytes of codes, a word. A program takes one such eight:
a thread takes words of all its rows, so loads are of 16 bytes (of mxfp4, whose eights
of blocks are 136 bytes, of 8) and what it reads of x serves eight weights.

A code becomes a float exactly: as a number it is put into the low bits of a float whose
exponent makes them count 1, and that float without them is subtracted; as a small float
(mxfp4, fp8) it is moved to where a float16 has its exponent, which the scale makes up
for. Codes are multiplied and summed in float32 over a word, then meet their scale.

Rows of x are taken by one, two or four, whose sums have one order. Beyond four the
weights are read again, from the device's caches. What comes from the host is first
copied whole into its slot by the program that needs it, in runs that the link likes.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels.few_work import Tile, Work

EIGHT = 8  # rows that stand interleaved
MOST_ROWS = 4  # that meet weights read once
HELD_BYTES = 288  # of weights by a thread, in its registers
MOST_WARPS = 16
ONE_BODY = True  # weights from the host are copied first, then as all others


class Format(NamedTuple):
    """How eights of a kind are stored."""

    block: int  # weights of a row that share a scale
    bits: int  # of a code
    scale_bytes: int

    @property
    def row_words(self) -> int:
        """Of a row in a block."""
        return self.block * self.bits // 32

    @property
    def scale_words(self) -> int:
        """Of the eight rows in a block."""
        return EIGHT * self.scale_bytes // 4

    @property
    def words(self) -> int:
        """Of an eight in a block."""
        return self.scale_words + EIGHT * self.row_words

    @property
    def rows(self) -> int:
        """Whose words are one load: 16 bytes where blocks begin at such places."""
        return 4 if self.words % 4 == 0 else 2


FORMATS = {
    "q8_0x8": Format(32, 8, 2),
    "q4_0x8": Format(32, 4, 2),
    "mxfp4x8": Format(32, 4, 1),
    "int4x8": Format(32, 4, 2),
    "fp8x8": Format(128, 8, 4),
}


def eight_words(kind: str, width: int) -> int:
    """Of eight rows of so many weights."""
    return width // FORMATS[kind].block * FORMATS[kind].words


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


def places(kind: str, width: int, lanes: int) -> Iterator[tuple]:
    """Where a program's threads find an eight's words, turn by turn.

    Yields:
      int32 `[lanes, 1]`: the first scale of each thread's block; the first code of its
      word; its word's first column; and whether there is such a word.
    """
    form = FORMATS[kind]
    words = width // form.block * form.row_words
    for begin in range(0, words, lanes):
        word_L1 = begin + jnp.arange(lanes, dtype=jnp.int32)[:, None]
        block_L1, inside_L1 = word_L1 // form.row_words, word_L1 % form.row_words
        scale_L1 = block_L1 * form.words
        code_L1 = scale_L1 + form.scale_words + inside_L1 * EIGHT
        column_L1 = block_L1 * form.block + 4 * inside_L1
        yield scale_L1, code_L1, column_L1, word_L1 < words


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

    turns = [*places(kind, work.width, 32 * work.tile.warps)]
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
                scale = _scales(kind, scales, part)
                values, wrong = _decode(kind, words), _wrong(kind, words)
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
            sums = [jnp.sum(one[part], axis=0) for one in total]
            if work.biases[0] is not None:
                given = ((first + outs, outs >= 0) for first in work.biases)
                biases = [
                    lax.bitcast_convert_type(load(at), jnp.float32) for at in given
                ]
                sums = [a + b for a, b in zip(sums, biases, strict=True)]
            work.finish(pair, sums, outs, outs >= 0)


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


def _decode(kind: str, words) -> list:
    """A word's codes in order of column as float32, but for a factor of `_scales`."""
    if kind == "fp8x8":
        found = []
        for odd in (0, 1):  # bytes 0 and 2, then 1 and 3, as the exponents' low bits
            sign = words if odd else words << 8
            size = _shifted(words, 1) if odd else words << 7
            halves = (sign & _bits(0x80008000)) | (size & _bits(0x3F803F80))
            found.append(_float16s(halves))
        return [found[0][0], found[1][0], found[0][1], found[1][1]]
    if kind == "mxfp4x8":
        found = []
        for nibble in range(4):  # and the fourth after it
            high = words << (12 - 4 * nibble)
            size = _shifted(high, 3) & _bits(0x0E000E00)
            found.append(_float16s((high & _bits(0x80008000)) | size))
        low, high = zip(*found, strict=True)
        codes = [*low, *high]  # of byte 0: columns 0 and 16
        return codes[::2] + codes[1::2]
    if kind == "q8_0x8":
        words = words ^ _bits(0x80808080)  # to 0..255
        return [_number(words, 8 * byte, 255, 128) for byte in range(4)]
    halves = ((8 * byte + 4 * half) for half in (0, 1) for byte in range(4))
    return [_number(words, bit, 15, 8) for bit in halves]


def _number(words, bit: int, mask: int, less: int):
    """The unsigned number at `bit`, less a number, exactly."""
    words, bit = (words, bit) if bit < 16 else (_shifted(words, 16), bit - 16)
    counts_one = 23 - bit  # the exponent with which the bit `bit` of a float counts 1
    bits = (words & _bits(mask << bit)) | _bits((127 + counts_one) << 23)
    both = lax.bitcast_convert_type(bits, jnp.float32)
    return both - np.float32(2.0**counts_one + less)


def _float16s(words) -> tuple:
    """The two float16 of a word, the low one first, as float32."""
    low, high = words.astype(jnp.int16), _shifted(words, 16).astype(jnp.int16)
    return tuple(_float16(half) for half in (low, high))


def _float16(bits):
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _wrong(kind: str, words):
    """Where a code of a word is NaN; None: the kind has no such code."""
    if kind != "fp8x8":
        return None
    size = words & _bits(0x7F7F7F7F)
    return ((size + _bits(0x01010101)) & _bits(0x80808080)) != 0


def _scales(kind: str, words: list, part: int):
    """Factors float32 `[lanes, rows]` of the rows of a part, which `_decode` left."""
    rows = FORMATS[kind].rows
    row_1N = part * rows + jnp.arange(rows, dtype=jnp.int32)[None]
    if kind == "fp8x8":
        bits = _chosen(words[part * rows :][:rows], row_1N % rows)
        return lax.bitcast_convert_type(bits, jnp.float32) * np.float32(2.0**8)
    if kind == "mxfp4x8":
        exponent = _shifted(words[part * rows // 4], 8 * (row_1N % 4)) & 255
        # 2 ** (e - 127), and 2 ** 14 for the bias of float16; infinity from e 241 on.
        exponent = jnp.minimum(exponent + 14, 255)
        return lax.bitcast_convert_type(exponent << 23, jnp.float32)
    here = _chosen(words[part * rows // 2 :][: rows // 2], row_1N % rows // 2)
    if kind == "int4x8":
        here = jnp.where(row_1N % 2 == 0, here << 16, here & _bits(0xFFFF0000))
        return lax.bitcast_convert_type(here, jnp.float32)
    return _float16(_shifted(here, 16 * (row_1N % 2)).astype(jnp.int16))


def _chosen(words: list, index_1N):
    """`[lanes, N]`: of each column the word that the index says."""
    found = words[0]
    for number, word_L1 in enumerate(words[1:], 1):
        found = jnp.where(index_1N == number, word_L1, found)
    return found


def _shifted(words, bits):
    """To the right, zeros after."""
    return lax.shift_right_logical(*jnp.broadcast_arrays(words, jnp.int32(bits)))


def _bits(pattern: int) -> np.int32:
    return np.uint32(pattern).view(np.int32)


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
