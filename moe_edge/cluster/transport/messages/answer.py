"""The thread that answers calls and control messages of other processes.

It answers in order and never asks anybody, so no two processes can wait for each other.
Who sends what cannot be read is told so once and is not read again.
"""

import sys
import threading
import traceback
from collections.abc import Callable

import zmq

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Handlers, Traffic
from moe_edge.cluster.transport.messages.sockets import IDENTITY
from moe_edge.cluster.transport.wire import Kind
from moe_edge.cluster.transport.wire_control import decode_control, encode_control
from moe_edge.core.checks import MoeEdgeError

SLICE_MS = 100  # how often it looks whether it is to end
ZERO_COPY_BYTES = 1 << 16  # from here ZeroMQ's own copy is worth avoiding


class Answering(threading.Thread):
    """Reads questions from a socket and answers them, until `stop`.

    Args:
      socket: a ROUTER, or a PAIR that carries its messages; closed at the end.
      answer: (peer, frame) -> answer or None; raises WireError.
      after: done when an answer is on its way.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        answer: Callable[[int, bytes], bytes | None],
        traffic: Traffic,
        after: Callable[[], None] | None = None,
    ):
        super().__init__(name="moe_edge-calls", daemon=True)
        self._after = after
        self._socket = socket
        self._answer = answer
        self._traffic = traffic
        self._peers: dict[bytes, int] = {}  # identity -> number
        self._banned: set[bytes] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends the thread after the answer it is at."""
        self._stopping = True

    def run(self) -> None:
        self._socket.rcvtimeo = SLICE_MS
        while not self._stopping:
            try:
                identity, *frames = self._socket.recv_multipart()
            except zmq.Again:
                continue
            if identity in self._banned:
                continue
            try:
                self._one(identity, frames)
            except wire.WireError as error:
                self._banned.add(identity)
                self._send(identity, wire.encode_text(Kind.REFUSED, 0, str(error)))
        self._socket.close()

    def _one(self, identity: bytes, frames: list[bytes]) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            if len(identity) != IDENTITY.size:
                raise wire.WireError(f"a name of {len(identity)} bytes")
            _, peer, _ = IDENTITY.unpack(identity)
            self._peers[identity] = peer
        if len(frames) != 1:
            raise wire.WireError(f"{len(frames)} frames, expected 1")
        frame = frames[0]
        answer = self._answer(peer, frame)
        # Counted before the asker can see the answer.
        self._traffic.add_received(peer, frame[wire.KIND_AT], len(frame))
        if answer is not None:
            self._traffic.add_sent(peer, answer[wire.KIND_AT], len(answer))
            self._send(identity, answer)
            if self._after is not None:
                self._after()

    def _send(self, identity: bytes, answer: bytes) -> None:
        self._socket.send(identity, zmq.SNDMORE)
        self._socket.send(answer, 0, len(answer) < ZERO_COPY_BYTES)


def answer_calls(handlers: Handlers):
    """Answers calls and control messages by handlers."""

    def call(peer: int, number: int, question) -> bytes:
        rows = handlers.call(peer, question)
        if rows is None:
            return wire.prefix(Kind.NOT_HERE, number)
        return wire.encode_rows(number, rows)

    def control(peer: int, number: int, question) -> bytes:
        fields, arrays = handlers.control(peer, *question)
        return encode_control(Kind.REPLY, number, "", fields, arrays)

    def post(peer: int, number: int, question) -> None:
        try:
            handlers.control(peer, *question)
        except MoeEdgeError as error:  # nobody is told, so this process's log keeps it
            line = " ".join(str(error).split())
            print(f"{question[0]!r} of process {peer}: {line}", file=sys.stderr)

    def answer(peer: int, frame: bytes) -> bytes | None:
        kind, _, number = wire.read_prefix(frame)
        if kind == Kind.CALL:
            question = wire.decode_call(frame)
            return guarded(call, peer, number, question)
        if kind == Kind.CONTROL:
            return guarded(control, peer, number, decode_control(frame))
        if kind == Kind.POST:
            guarded(post, peer, number, decode_control(frame))
            return None
        raise wire.WireError(f"{kind.name} at the port of calls")

    return answer


def guarded(handle, peer: int, number: int, question):
    """The handler's answer, or its error, in one line for the asker."""
    try:
        return handle(peer, number, question)
    except MoeEdgeError as error:
        text = str(error)
    except Exception as error:
        traceback.print_exc()  # a fault of ours: this process's log keeps it
        text = f"{type(error).__name__}: {error}"
    return wire.encode_text(Kind.ON_ERROR, number, text)
