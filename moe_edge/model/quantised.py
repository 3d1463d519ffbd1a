"""Blocks of 32 weights in few bits: formats q8_0, q4_0, mxfp4, byte for byte GGUF's.

  q8_0   a float16 scale d, 32 int8 codes q: d * q                         34 bytes
  q4_0   a float16 scale d, 16 bytes: d * (q - 8) of codes q in 0..15      18 bytes
         low halves are weights 0..15, high halves 16..31
  mxfp4  a byte e, 16 bytes as of q4_0: 2 ** (e - 127) * FP4[q]            17 bytes
         what gpt-oss was trained in (OCP Microscaling Formats, version 1.0)

Two more are never rounded to, but hold what some models are published in, bit for bit:

  int4   a bfloat16 scale, 16 bytes as of q4_0: what Kimi-K2 was trained in   18 bytes
  fp8    a float32 scale, 128 float8 (e4m3fn): DeepSeek-V3's blocks of 128 rows and
         columns, whose scale stands here in each of the rows                132 bytes

A row of weights is a row of blocks. In checkpoints of ours eight rows stand interleaved
(kinds `q8_0x8` and the like), so that one instruction meets weights of several: of each
block the scales of the eight, then of each row in turn four bytes of codes, as often as
it takes. Stored arrays `[..., O, bytes]` are then `[..., O / 8, 8 * bytes]`.

Bytes are little-endian. `decode` takes arrays of NumPy and of JAX alike.
"""

import dataclasses
import functools
import operator

import ml_dtypes
import numpy as np

from moe_edge.core.checks import ConfigError, check_known

BLOCK = 32  # weights that share a scale, of all kinds but fp8
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "mxfp4": 17, "int4": 18, "fp8": 132}
SCALE_BYTES = {"q8_0": 2, "q4_0": 2, "mxfp4": 1, "int4": 2, "fp8": 4}
KEPT_KINDS = ("fp8", "int4")  # of experts alone, taken over from files
KINDS = tuple(kind for kind in BLOCK_BYTES if kind not in KEPT_KINDS)
EIGHT = 8  # rows that stand interleaved
IN_EIGHTS = {kind: f"{kind}x8" for kind in BLOCK_BYTES}
for _kind, _eight in IN_EIGHTS.items():
    BLOCK_BYTES[_eight], SCALE_BYTES[_eight] = BLOCK_BYTES[_kind], SCALE_BYTES[_kind]
STORED_KINDS = tuple(BLOCK_BYTES)
DENSE_KINDS = ("q8_0", "q4_0")  # that dense weights are converted to
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # float4 e2m1 by code
FP4 = np.concatenate([FP4, -FP4])


def format_of(kind: str | None) -> str | None:
    """The format of a stored kind, or of several joined by "+"; None of None."""
    return kind and "+".join(sorted({*kind.replace("x8", "").split("+")}))


def is_interleaved(kind: str | None) -> bool:
    return kind in IN_EIGHTS.values()


def rounds_activations(kind: str | None) -> bool:
    """Whether kernels meet blocks of a kind with activations of 8 bits (`int8`)."""
    return is_interleaved(kind) and format_of(kind) not in KEPT_KINDS


def block_of(kind: str) -> int:
    """Weights that share a scale."""
    return 128 if format_of(kind) == "fp8" else BLOCK


def stored_shape(kind: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Of the bytes of weights `[O, I]`."""
    rows, size = shape[0], row_bytes(kind, shape[1])
    return (rows // EIGHT, EIGHT * size) if is_interleaved(kind) else (rows, size)


def row_bytes(kind: str, width: int) -> int:
    """Bytes of `width` weights, whole blocks.

    Raises:
      ConfigError: an unknown kind, or a width that no blocks fill.
    """
    check_known("quantised format", kind, STORED_KINDS)
    if width % (block := block_of(kind)):
        raise ConfigError(
            f"{kind} holds weights in blocks of {block}, which do not fill a width of "
            f"{width}"
        )
    return width // block * BLOCK_BYTES[kind]


def bytes_per_weight(kind: str | None) -> float | None:
    """Mean bytes of a weight, its share of the scale included; None of None."""
    return None if kind is None else BLOCK_BYTES[kind] / block_of(kind)


def kind_of(stored: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """The kind in which weights of a shape have the stored shape; None: there is none.

    Of dense matrices, no two of whose kinds have rows of as many bytes.
    """
    if len(shape) != 2 or shape[1] % BLOCK:
        return None
    of_kinds = {
        stored_shape(kind, shape): kind
        for kind in (*KINDS, *(IN_EIGHTS[kind] for kind in KINDS))
        if not (is_interleaved(kind) and shape[0] % EIGHT)
    }
    return of_kinds.get(tuple(stored))


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A dense matrix `[O, I]` in blocks, of NumPy: as files hold it.

    Attributes:
      kind: one of STORED_KINDS.
      rows: uint8 of `stored_shape(kind, (O, I))`.
    """

    kind: str
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        rows = EIGHT if is_interleaved(self.kind) else 1
        width = self.rows.shape[1] // (rows * BLOCK_BYTES[self.kind]) * BLOCK
        return rows * len(self.rows), width

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def decode(self) -> np.ndarray:
        """float32 `[O, I]`."""
        return decode(self.kind, self.rows)

    def part(self, first: int, count: int) -> "Matrix":
        """Rows from `first` on, at most `count`; both in whole eights."""
        each = EIGHT if is_interleaved(self.kind) else 1
        return Matrix(self.kind, self.rows[first // each : (first + count) // each])

    def interleaved(self) -> "Matrix":
        """The same in eights; itself where its rows are none."""
        if is_interleaved(self.kind) or len(self.rows) % EIGHT:
            return self
        return Matrix(IN_EIGHTS[self.kind], interleave(self.kind, self.rows))


def as_stored(weight) -> np.ndarray:
    """A dense weight's array: of a `Matrix` its rows."""
    return weight.rows if isinstance(weight, Matrix) else weight


def interleave(kind: str, rows):
    """uint8 `[..., O / 8, 8 * bytes]` of `[..., O, bytes]`, of NumPy or JAX.

    Args:
      kind: of the rows, one that is not interleaved.
    """
    xp, size = rows.__array_namespace__(), SCALE_BYTES[kind]
    *lead, count, width = rows.shape
    blocks = rows.reshape(*lead, count // EIGHT, EIGHT, -1, BLOCK_BYTES[kind])
    blocks = xp.moveaxis(blocks, -3, -2)  # of each block the eight rows
    scales = blocks[..., :size].reshape(*blocks.shape[:-2], -1)
    codes = blocks[..., size:].reshape(*blocks.shape[:-1], -1, 4)
    codes = xp.moveaxis(codes, -3, -2).reshape(*blocks.shape[:-2], -1)
    whole = xp.concatenate([scales, codes], axis=-1)
    return whole.reshape(*lead, count // EIGHT, EIGHT * width)


def _apart(kind: str, eights):
    """The rows that `interleave` of them made these of."""
    xp, size, block = (
        eights.__array_namespace__(),
        EIGHT * SCALE_BYTES[kind],
        EIGHT * BLOCK_BYTES[kind],
    )
    *lead, G, width = eights.shape
    blocks = eights.reshape(*lead, G, -1, block)
    scales = blocks[..., :size].reshape(*blocks.shape[:-1], EIGHT, -1)
    codes = blocks[..., size:].reshape(*blocks.shape[:-1], -1, EIGHT, 4)
    codes = xp.moveaxis(codes, -2, -3).reshape(*blocks.shape[:-1], EIGHT, -1)
    whole = xp.moveaxis(xp.concatenate([scales, codes], axis=-1), -2, -3)
    return whole.reshape(*lead, G * EIGHT, width // EIGHT)


def one_of_eight(values, ids):
    """`[..., I]` of `[..., 8, I]`: of each eight the row that one of `ids [...]` is."""
    xp = values.__array_namespace__()
    place = (ids % EIGHT)[..., None, None]
    return xp.take_along_axis(values, place, axis=-2)[..., 0, :]


def decode(kind: str, rows):
    """float32 `[..., O, I]` of stored rows; `[..., I]` of one that is not interleaved.

    Args:
      kind: one of STORED_KINDS.
      rows: uint8 of `stored_shape`, of NumPy or JAX.
    """
    if is_interleaved(kind):
        kind, rows = format_of(kind), _apart(format_of(kind), rows)
    blocks, xp = _blocks(kind, rows), rows.__array_namespace__()
    codes = blocks[..., SCALE_BYTES[kind] :]
    if kind == "q8_0":
        values = codes.view(xp.int8).astype(xp.float32)
    elif kind == "fp8":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(xp.float32)
    else:
        halves = xp.concatenate([codes & 15, codes >> 4], axis=-1)
        if kind in ("q4_0", "int4"):
            values = halves.astype(xp.float32) - 8.0
        else:  # doubled, as the scales are half of what they say
            values = xp.asarray(2 * FP4)[halves]
    with np.errstate(invalid="ignore", over="ignore"):  # a scale of infinity times 0
        return (values * _scales(kind, blocks)).reshape(*rows.shape[:-1], -1)


def scales(kind: str, rows):
    """float32 `[..., blocks, 1]`: weights are finite where these are.

    Args: as of `decode`; rows may also be flat.
    """
    if is_interleaved(kind):
        kind, size = format_of(kind), SCALE_BYTES[kind]
        blocks = rows.reshape(*rows.shape[:-1], -1, EIGHT * BLOCK_BYTES[kind])
        found = blocks[..., : EIGHT * size].reshape(*rows.shape[:-1], -1, size)
        return _scales(kind, found)
    return _scales(kind, _blocks(kind, rows))


def _blocks(kind: str, rows):
    check_known("quantised format", kind, tuple(IN_EIGHTS))
    size = BLOCK_BYTES[kind]
    if rows.shape[-1] % size:
        raise ConfigError(
            f"{rows.shape[-1]} bytes are no whole blocks of {kind}, which have {size}"
        )
    return rows.reshape(*rows.shape[:-1], -1, size)


def _scales(kind: str, blocks):
    xp = blocks.__array_namespace__()
    if kind == "mxfp4":  # half of them, so that they are finite also of the byte 255
        exponents = blocks[..., :1].astype(xp.uint32)
        small = xp.uint32(1 << 21) << xp.minimum(exponents, xp.uint32(1))
        bits = xp.where(exponents < 2, small, (exponents - xp.uint32(1)) << 23)
        return bits.view(xp.float32)
    if kind in KEPT_KINDS:
        shifts = range(0, 32, 8) if kind == "fp8" else (16, 24)
        parts = (
            blocks[..., n : n + 1].astype(xp.uint32) << shift
            for n, shift in enumerate(shifts)
        )
        return functools.reduce(operator.or_, parts).view(xp.float32)
    low, high = blocks[..., :1].astype(xp.uint16), blocks[..., 1:2].astype(xp.uint16)
    return (low | (high << 8)).view(xp.float16).astype(xp.float32)
