"""Control messages on the wire: a JSON object and raw arrays, whose types it states."""

import json
import math
import struct

import numpy as np

from moe_edge.cluster.transport.wire import PREFIX, Kind, WireError, prefix
from moe_edge.core.json_reader import parse_json

MAX_JSON_BYTES = 8 << 20
MAX_RANK = 8
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
).split()

_LENGTH = struct.Struct("<I4x")
_START = PREFIX.size + _LENGTH.size
_ALIGN = 8


def encode_control(
    kind: Kind,
    number: int,
    name: str,
    fields: dict,
    arrays: dict[str, np.ndarray],
) -> bytes:
    """A CONTROL, POST or REPLY (whose name is empty).

    Raises:
      WireError: fields that are no JSON or too long, or an array of another type.
    """
    stated = []
    parts: list = [prefix(kind, number), b"", b""]
    for key, array in arrays.items():
        if array.dtype.name not in DTYPES or array.ndim > MAX_RANK:
            raise WireError(
                f"{name}: array {key} is {array.dtype.name} of rank {array.ndim}, "
                f"expected rank {MAX_RANK} or less of {', '.join(DTYPES)}"
            )
        stated.append([key, array.dtype.name, list(array.shape)])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        parts += [little.tobytes(), bytes(-array.nbytes % _ALIGN)]
    try:
        text = json.dumps([name, fields, stated], separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"{name}: its fields are no JSON: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise WireError(
            f"{name}: {len(text)} bytes of fields, expected at most {MAX_JSON_BYTES}"
        )
    parts[1] = _LENGTH.pack(len(text))
    parts[2] = text + bytes(-len(text) % _ALIGN)
    return b"".join(parts)


def decode_control(frame: bytes) -> tuple[str, dict, dict[str, np.ndarray]]:
    """Name, fields and arrays (views of the frame) of a control message.

    Raises:
      WireError: not what `encode_control` writes.
    """
    if len(frame) < _START:
        raise WireError(f"control message of {len(frame)} bytes, expected {_START}")
    (length,) = _LENGTH.unpack_from(frame, PREFIX.size)
    if length > min(MAX_JSON_BYTES, len(frame) - _START):
        raise WireError(f"control message states {length} bytes of JSON")
    text = bytes(frame[_START : _START + length])
    message = parse_json("control message", text, WireError, strict=False)
    if not (isinstance(message, list) and len(message) == 3):
        raise WireError("control message without [name, fields, arrays]")
    name, fields, stated = message
    if not (isinstance(name, str) and isinstance(fields, dict)):
        raise WireError("control message whose name or fields are of another type")
    if not isinstance(stated, list):
        raise WireError(f"{name!r}: its arrays are no list")
    arrays = {}
    at = _START + length + -length % _ALIGN
    for entry in stated:
        key, dtype, shape = _entry(name, entry)
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(frame):
            raise WireError(f"{name!r}: array {key!r} {shape} ends beyond the message")
        try:
            arrays[key] = np.ndarray(shape, dtype, frame, at)
        except ValueError:
            raise WireError(f"{name!r}: array {key!r} {shape} is too large") from None
        at += size + -size % _ALIGN
    if at != len(frame) or len(arrays) != len(stated):
        raise WireError(f"{name!r}: {len(frame)} bytes, expected {at}")
    return name, fields, arrays


def _entry(name: str, entry) -> tuple[str, np.dtype, tuple[int, ...]]:
    """Name, type and shape that a message states for an array."""
    if not (isinstance(entry, list) and len(entry) == 3):
        raise WireError(f"{name!r}: an array without [name, dtype, shape]")
    key, dtype, shape = entry
    if not (isinstance(key, str) and dtype in DTYPES and isinstance(shape, list)):
        raise WireError(f"{name!r}: an array {key!r} of dtype {dtype!r}")
    whole = all(type(size) is int and 0 <= size < 2**40 for size in shape)
    if len(shape) > MAX_RANK or not whole:
        raise WireError(f"{name!r}: array {key!r} has shape {shape}")
    return key, np.dtype(dtype).newbyteorder("<"), tuple(shape)
