"""Gives blocks to other processes, each over a connection of its own, by TLS.

On threads of their own, so that a call never stands behind blocks. Who has another
secret, or sends what cannot be read, is hung up on.
"""

import contextlib
import socket
import ssl
import threading
import time

import numpy as np

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Handlers, Traffic
from moe_edge.cluster.transport.messages.answer import SLICE_MS, guarded
from moe_edge.cluster.transport.messages.sockets import HANDSHAKE_MS, cannot_listen
from moe_edge.cluster.transport.messages.stream import LENGTH, hang_up, receive, send
from moe_edge.cluster.transport.wire import Kind

MAX_CONNECTIONS = 256  # strangers must not cost a process all its threads
BUFFER_BYTES = 1 << 17  # so little of a block waits on a link before a call
PAUSE_S = 0.01  # after a connection that could not be accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket at which blocks are asked for; port 0 takes a free one.

    Raises:
      ConfigError: it cannot be bound.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise cannot_listen(host, port, error) from None


class BlockServer(threading.Thread):
    """Accepts connections and answers them, until `stop`.

    Args:
      listener: of `listen`; closed at the end.
      context: of TLS, as a server.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        handlers: Handlers,
        traffic: Traffic,
    ):
        super().__init__(name="moe_edge-blocks", daemon=True)
        self._listener = listener
        self._context = context
        self._handlers = handlers
        self._traffic = traffic
        self._open: dict[ssl.SSLSocket, threading.Thread] = {}
        self._stopping = False

    def stop(self) -> None:
        """Ends all connections, those in a handler after it."""
        self._stopping = True

    def run(self) -> None:
        self._listener.settimeout(SLICE_MS / 1000)
        while not self._stopping:
            try:
                self._accept()
            except TimeoutError:
                pass  # none has come
            except OSError:  # it has gone, or there are too many open files
                time.sleep(PAUSE_S)
        self._listener.close()
        ending = list(self._open.items())
        for stream, _ in ending:
            hang_up(stream)
        for _, thread in ending:
            thread.join()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        stream = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(
            target=self._serve, args=(stream,), name=self.name, daemon=True
        )
        self._open[stream] = thread
        thread.start()

    # Of each connection's thread.

    def _serve(self, stream: ssl.SSLSocket) -> None:
        try:
            stream.settimeout(HANDSHAKE_MS / 1000)
            stream.do_handshake()
            stream.settimeout(None)
            while True:
                self._answer(stream)
        except OSError:
            pass  # it has ended, or is a stranger's
        except wire.WireError as error:
            with contextlib.suppress(OSError):
                send(stream, wire.encode_text(Kind.REFUSED, 0, str(error)))
        finally:
            del self._open[stream]
            stream.close()

    def _answer(self, stream: ssl.SSLSocket) -> None:
        """Reads a question and answers it."""
        question = receive(stream, LENGTH.size + wire.BLOCK_BYTES)
        (size,), frame = LENGTH.unpack_from(question), question[LENGTH.size :]
        kind, _, number = wire.read_prefix(frame)
        if kind != Kind.BLOCK or size != len(frame):
            raise wire.WireError(f"{kind.name} of {size} bytes at the port of blocks")
        request = wire.decode_block(frame)
        answer = guarded(self._record, request.peer, number, request)
        frame, record = (answer, b"") if isinstance(answer, bytes) else answer
        # Counted before the asker can see the answer.
        self._traffic.add_received(request.peer, kind, size)
        size = len(frame) + len(record)
        self._traffic.add_sent(request.peer, frame[wire.KIND_AT], size)
        send(stream, frame, record)

    def _record(self, peer: int, number: int, request: wire.BlockRequest):
        """The start of the answer and the record's bytes."""
        record = self._handlers.block(request.layer, request.block)
        if record is None:
            return wire.prefix(Kind.NOT_HERE, number)
        return wire.prefix(Kind.RECORD, number), record.reshape(-1).view(np.uint8)
