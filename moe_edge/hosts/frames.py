"""Frames on a socket between two processes of a run: a kind, a length, the payload."""

import json
import socket
import struct
from typing import Any

from moe_edge.core.json_reader import parse_json

# What a process says first, and the answers; signs of life; what programs tell each
# other; the end of a process; the wish that all end.
HELLO, WELCOME, REFUSAL, BEAT, DATA, END, STOP = b"HWRBDES"
MOST_BYTES = 64 << 20  # of a payload; a step's plan has some thousand
_HEAD = struct.Struct(">4sBI")
_MAGIC = b"moe1"


class FrameError(ConnectionError):
    """What came is no frame of ours: another program is at the other end."""


def pack(kind: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEAD.pack(_MAGIC, kind, len(payload)) + payload


def pack_json(kind: int, value: Any) -> bytes:
    """The bytes of a frame that holds a JSON value."""
    return pack(kind, json.dumps(value).encode())


def read(sock: socket.socket) -> tuple[int, bytes]:
    """The next frame: its kind and payload.

    Raises:
      FrameError: what came is no frame.
      ConnectionError: the other end is closed; TimeoutError: as the socket says.
    """
    magic, kind, size = _HEAD.unpack(_read_bytes(sock, _HEAD.size))
    if magic != _MAGIC or size > MOST_BYTES:
        raise FrameError("what came is no message of moe_edge")
    return kind, _read_bytes(sock, size)


def read_json(payload: bytes) -> Any:
    """The JSON value of a payload; FrameError if it has none."""
    return parse_json("a message between processes", payload, FrameError, strict=False)


def _read_bytes(sock: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = sock.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("closed by the other end")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
