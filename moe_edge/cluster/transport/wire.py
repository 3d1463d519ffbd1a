"""The messages of a cluster: one frame each, a fixed header, then raw arrays.

Little-endian throughout; nothing is pickled. A message of any other form raises
`WireError`, and the reader gives up that connection.

  every message   magic, version, kind, flags, number (answers carry their question's)
  CALL            layer, bucket, placement version, tokens T, pairs P;
                  x float32 [T, D], token uint16 [P], block uint16 [P]
  ROWS            rows, width; float32 [rows, width]
  NOT_HERE        nothing
  BLOCK           the asker's number, layer, block
  RECORD          the record
  CONTROL, POST,  `wire_control.py`
  REPLY
  ON_ERROR        UTF-8 text: the handler's error
  REFUSED         UTF-8 text: why nothing more is read from this connection
"""

import enum
import struct
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.transport.base import Call
from moe_edge.core.checks import MoeEdgeError

WIRE_VERSION = 3
MAGIC = b"MoEc"

MAX_TOKENS = 1 << 16  # uint16 in `token`
MAX_TEXT_BYTES = 2000

PREFIX = struct.Struct("<4sHBBQ")
KIND_AT = 6  # the byte that holds the kind
_CALL = struct.Struct("<IIIII4x")
_CALL_HEAD = struct.Struct(PREFIX.format + _CALL.format[1:])
_ROWS = struct.Struct("<II")
_ROWS_HEAD = struct.Struct(PREFIX.format + _ROWS.format[1:])
_BLOCK = struct.Struct("<III4x")

_CALL_START = _CALL_HEAD.size
ROWS_START = _ROWS_HEAD.size
BLOCK_BYTES = PREFIX.size + _BLOCK.size

_FLOAT, _SHORT = np.dtype("<f4"), np.dtype("<u2")


class WireError(MoeEdgeError):
    """A message that is not of the form agreed on."""


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 1
    ROWS = 2
    NOT_HERE = 3
    BLOCK = 4
    RECORD = 5
    CONTROL = 6
    POST = 7
    REPLY = 8
    ON_ERROR = 9
    REFUSED = 10


_KINDS = {int(kind): kind for kind in Kind}


class Prefix(NamedTuple):
    """What every message begins with."""

    kind: Kind
    flags: int
    number: int


class BlockRequest(NamedTuple):
    """Who asks for which block."""

    peer: int
    layer: int
    block: int


def read_prefix(frame: bytes) -> Prefix:
    """The beginning of a message.

    Raises:
      WireError: too short, another magic, version, kind or flag.
    """
    if len(frame) < PREFIX.size:
        raise WireError(
            f"message of {len(frame)} bytes, expected {PREFIX.size} or more"
        )
    magic, version, code, flags, number = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"message begins with {magic!r}, expected {MAGIC!r}")
    if version != WIRE_VERSION:
        raise WireError(
            f"wire version {version}, expected {WIRE_VERSION}; run one release "
            "everywhere"
        )
    kind = _KINDS.get(code)
    if kind is None:
        raise WireError(f"message of kind {code}, expected 1 to {max(_KINDS)}")
    if flags:
        raise WireError(f"{kind.name} with flags {flags:#x}, expected none")
    return Prefix(kind, flags, number)


def prefix(kind: Kind, number: int) -> bytes:
    """The beginning of a message; all of a NOT_HERE."""
    return PREFIX.pack(MAGIC, WIRE_VERSION, kind, 0, number)


def encode_call(number: int, call: Call) -> bytes:
    """A CALL.

    Raises:
      WireError: arrays of other types, layouts or sizes than `Call` says.
    """
    x_TD, token_P, block_P = call.x_TD, call.token_P, call.block_P
    tokens, pairs = len(x_TD), len(token_P)
    fits = (
        x_TD.ndim == 2
        and x_TD.dtype == _FLOAT
        and 0 < tokens <= MAX_TOKENS
        and 0 < pairs == len(block_P)
        and token_P.dtype == _SHORT
        and block_P.dtype == _SHORT
    )
    place = call.layer, call.bucket, call.version
    try:
        if fits and x_TD.size:
            head = _CALL_HEAD.pack(
                MAGIC, WIRE_VERSION, Kind.CALL, 0, number, *place, tokens, pairs
            )
            return b"".join((head, x_TD, token_P, block_P))
    except struct.error:
        raise WireError(
            f"call of layer, bucket and version {place}; expected whole numbers below "
            "2^32"
        ) from None
    except TypeError:
        pass  # `join` takes no array with gaps
    raise WireError(
        f"call with x {_text(x_TD)}, token {_text(token_P)}, block {_text(block_P)}; "
        f"expected C-contiguous float32 [1 to {MAX_TOKENS}, D] and uint16 [P] twice"
    )


def decode_call(frame: bytes) -> Call:
    """The call in a CALL; its arrays are views of the frame.

    Raises:
      WireError: sizes that do not fit, or a token beyond T.
    """
    _check_length(Kind.CALL, frame, _CALL_START)
    layer, bucket, version, tokens, pairs = _CALL.unpack_from(frame, PREFIX.size)
    x_bytes = len(frame) - _CALL_START - 4 * pairs
    if not (0 < tokens <= MAX_TOKENS and pairs and bucket):
        raise WireError(
            f"CALL of {tokens} tokens, {pairs} pairs and bucket {bucket}, expected 1 "
            f"to {MAX_TOKENS} tokens and 1 or more of the others"
        )
    if x_bytes <= 0 or x_bytes % (4 * tokens):
        raise WireError(
            f"CALL of {len(frame)} bytes with {tokens} tokens and {pairs} pairs: "
            f"{x_bytes} bytes of states are no rows of float32"
        )
    at = _CALL_START + x_bytes
    x_TD = np.ndarray((tokens, x_bytes // (4 * tokens)), _FLOAT, frame, _CALL_START)
    token_P = np.ndarray(pairs, _SHORT, frame, at)
    block_P = np.ndarray(pairs, _SHORT, frame, at + 2 * pairs)
    # NumPy's way costs more than all else where there are few.
    few = pairs <= 64
    last = (
        max(memoryview(frame)[at : at + 2 * pairs].cast("H")) if few else token_P.max()
    )
    if last >= tokens:
        raise WireError(f"CALL names token {last}, expected less than {tokens}")
    return Call(layer, bucket, version, x_TD, token_P, block_P)


def encode_rows(number: int, rows: np.ndarray) -> bytes:
    """A ROWS.

    Raises:
      WireError: not float32, of rank 2 and C-contiguous.
    """
    if rows.ndim != 2 or rows.dtype != _FLOAT or not rows.flags.c_contiguous:
        raise WireError(f"rows are {_text(rows)}, expected C-contiguous float32 [R, D]")
    head = _ROWS_HEAD.pack(MAGIC, WIRE_VERSION, Kind.ROWS, 0, number, *rows.shape)
    return b"".join((head, rows))


def decode_rows(frame: bytes) -> np.ndarray:
    """float32 rows in a ROWS, a view of the frame.

    Raises:
      WireError: its size is another.
    """
    _check_length(Kind.ROWS, frame, ROWS_START)
    count, width = _ROWS.unpack_from(frame, PREFIX.size)
    if len(frame) - ROWS_START != 4 * count * width:
        raise WireError(
            f"ROWS of {len(frame)} bytes, expected {ROWS_START} and {count} x {width} "
            "float32"
        )
    return np.ndarray((count, width), _FLOAT, frame, ROWS_START)


def encode_block(number: int, request: BlockRequest) -> bytes:
    """A BLOCK."""
    return prefix(Kind.BLOCK, number) + _BLOCK.pack(*request)


def decode_block(frame: bytes) -> BlockRequest:
    """The request in a BLOCK.

    Raises:
      WireError: another length.
    """
    _check_length(Kind.BLOCK, frame, BLOCK_BYTES, exactly=True)
    return BlockRequest(*_BLOCK.unpack_from(frame, PREFIX.size))


def encode_text(kind: Kind, number: int, text: str) -> bytes:
    """An ON_ERROR or REFUSED: the text's first line, cut if it is long."""
    line = text.strip().split("\n", 1)[0].encode("utf-8", "replace")
    return prefix(kind, number) + line[:MAX_TEXT_BYTES]


def decode_text(frame: bytes) -> str:
    """The text in an ON_ERROR or REFUSED, in one line."""
    raw = bytes(frame[PREFIX.size : PREFIX.size + MAX_TEXT_BYTES])
    return "".join(
        c if c.isprintable() else " " for c in raw.decode("utf-8", "replace")
    )


def _check_length(kind: Kind, frame: bytes, length: int, exactly: bool = False) -> None:
    if len(frame) < length or (exactly and len(frame) != length):
        more = "" if exactly else " or more"
        raise WireError(f"{kind.name} of {len(frame)} bytes, expected {length}{more}")


def _text(array: np.ndarray | None) -> str:
    return "none" if array is None else f"{array.dtype}{list(array.shape)}"
