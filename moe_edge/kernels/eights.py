"""Eights of rows in blocks of few bits: where their words stand, and what they say.

Records are those that the CPU's kernels read (`model/quantised.py`): eight rows of a
matrix stand interleaved, and of each block of their columns first the eight scales,
then from each row in turn four bytes of codes, a word.

A code becomes a float exactly: as a number it is put into the low bits of a float whose
exponent makes them count 1, and that float without them is subtracted; as a small float
(mxfp4, fp8) it is moved to where a float16 has its exponent, which the scale makes up
for. All this is a few operations of a GPU's ordinary units.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.kernels import rows as rows_kernels
from moe_edge.kernels import switches

EIGHT = 8  # rows that stand interleaved
VARIABLE = "MOE_EDGE_PACKED"


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


def takes(kind: str | None) -> bool:
    """Whether kernels here decode blocks of a kind in registers.

    Never timed, so only where MOE_EDGE_PACKED is 1.

    Raises:
      ConfigError: another value than 0 or 1.
    """
    is_chosen = switches.chosen(VARIABLE, switches.OFF_ON, "0") == "1"
    return is_chosen and kind in FORMATS and rows_kernels.are_possible()


def suits(records_SR, layout) -> bool:
    """Whether the program that is traced meets records in blocks by those kernels.

    Args:
      records_SR: of any dtype.
      layout: of the records, a `RecordLayout`.
    """
    is_packed = isinstance(records_SR, jax.Array) and records_SR.dtype == jnp.uint8
    return is_packed and takes(layout.kind) and rows_kernels.are_wanted()


def eight_words(kind: str, width: int) -> int:
    """Of eight rows of so many weights."""
    return width // FORMATS[kind].block * FORMATS[kind].words


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


def decode(kind: str, words) -> list:
    """A word's codes in order of column as float32, but for a factor of `scales`."""
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


def wrong(kind: str, words):
    """Where a code of a word is NaN; None: the kind has no such code."""
    if kind != "fp8x8":
        return None
    size = words & _bits(0x7F7F7F7F)
    return ((size + _bits(0x01010101)) & _bits(0x80808080)) != 0


def scales(kind: str, words: list, part: int):
    """Factors float32 `[lanes, rows]` of the rows of a part, which `decode` left."""
    rows = FORMATS[kind].rows
    row_1N = part * rows + jnp.arange(rows, dtype=jnp.int32)[None]
    if kind == "fp8x8":
        bits = _chosen(words[part * rows :][:rows], row_1N % rows)
        return factor(kind, lax.bitcast_convert_type(bits, jnp.float32))
    if kind == "mxfp4x8":
        exponent = _shifted(words[part * rows // 4], 8 * (row_1N % 4)) & 255
        return factor(kind, exponent)
    here = _chosen(words[part * rows // 2 :][: rows // 2], row_1N % rows // 2)
    if kind == "int4x8":
        here = jnp.where(row_1N % 2 == 0, here << 16, here & _bits(0xFFFF0000))
        return lax.bitcast_convert_type(here, jnp.float32)
    return _float16(_shifted(here, 16 * (row_1N % 2)).astype(jnp.int16))


def factor(kind: str, scale):
    """Of a block's codes as decoded, in float32, from its scale as stored."""
    if kind == "fp8x8":
        return scale * np.float32(2.0**8)
    if kind == "mxfp4x8":
        # 2 ** (e - 127), and 2 ** 14 for the bias of float16; infinity from e 241 on.
        exponent = jnp.minimum(scale.astype(jnp.int32) + 14, 255)
        return lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return scale.astype(jnp.float32)


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
