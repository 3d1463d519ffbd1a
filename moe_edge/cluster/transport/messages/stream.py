"""Messages of `wire.py` on a connection by TLS, each after its length (8 bytes)."""

import socket
import ssl
import struct
import time

LENGTH = struct.Struct("<Q")
FIRST_BYTES = 1 << 13  # of a record, sent with the start of its message


def send(stream: ssl.SSLSocket, frame: bytes, record=b"") -> None:
    """Sends a message, which may end with the bytes of a record."""
    length = LENGTH.pack(len(frame) + len(record))
    # What is sent costs twice if the start goes alone: the receiver wakes up twice.
    stream.sendall(b"".join((length, frame, record[:FIRST_BYTES])))
    if len(record) > FIRST_BYTES:
        stream.sendall(record[FIRST_BYTES:])


def receive(stream: ssl.SSLSocket, size: int, until_s: float | None = None) -> bytes:
    """So many bytes; raises as `receive_into`."""
    data = bytearray(size)
    receive_into(stream, memoryview(data), until_s)
    return bytes(data)


def receive_into(
    stream: ssl.SSLSocket, view: memoryview, until_s: float | None = None
) -> None:
    """Fills a view, by this time of `time.monotonic` if one is given.

    Raises:
      OSError: the connection has ended or failed (TimeoutError: the time is up).
    """
    while len(view):
        if until_s is not None:
            limit(stream, until_s)
        if not (got := stream.recv_into(view)):
            raise ConnectionError("it was closed")
        view = view[got:]


def limit(stream: socket.socket, until_s: float) -> None:
    """Has what comes next fail at this time; raises TimeoutError if it is past."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    stream.settimeout(left_s)


def hang_up(stream: ssl.SSLSocket) -> None:
    """Ends a connection that another thread is using, and closes."""
    try:
        # Not that of SSLSocket: the other thread would go on without TLS.
        socket.socket.shutdown(stream, socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended, or never begun
