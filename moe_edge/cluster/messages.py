"""The default transport: ZeroMQ over TCP, encrypted with keys from the shared secret.

A process binds two ports, one for calls and control, one for blocks, so that calls
never queue behind blocks. To each peer it has three connections: the engine's thread
itself sends calls and reads their rows, `messages_watch.py` carries control and notices
lost peers, `messages_fetch.py` pulls blocks. `messages_answer.py` answers.
"""

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np
import zmq

from moe_edge.cluster import wire
from moe_edge.cluster.messages_answer import (
    ZERO_COPY_BYTES,
    Answering,
    answer_blocks,
    answer_calls,
)
from moe_edge.cluster.messages_delay import DelayLine
from moe_edge.cluster.messages_fetch import Fetcher
from moe_edge.cluster.messages_link import Link, malformed, monitored, unexpected
from moe_edge.cluster.messages_sockets import LINGER_MS, Sockets, numeric_host
from moe_edge.cluster.messages_watch import Watch
from moe_edge.cluster.transport import (
    Address,
    Call,
    Handlers,
    PeerLost,
    Refused,
    Traffic,
    Transport,
)
from moe_edge.cluster.wire import Kind
from moe_edge.cluster.wire_control import encode_control
from moe_edge.core.checks import ConfigError, check_count, check_from_zero

MAX_OPEN = 4096  # tickets not yet collected
END_S = 1.0  # for a thread to end; one that is stuck in a handler is left behind

_left_behind: list[zmq.Context] = []  # kept, as their end would wait for such threads


class MessagesTransport(Transport):
    """`Transport` by messages.

    Args:
      secret: shared by all (`keys.py`).
      host: the address to bind, and that peers are told.
      calls_port, blocks_port: 0 takes a free one.
      delay_ms: emulated, one way, on what this process is sent and what it answers.
      chunk_bytes, window: a block comes in pieces, this many asked for ahead.
    Raises:
      ConfigError: a port in use, a host that is not of this machine, a bad value.
    """

    def __init__(
        self,
        peer: int,
        secret: bytes,
        host: str = "127.0.0.1",
        calls_port: int = 0,
        blocks_port: int = 0,
        delay_ms: float = 0.0,
        chunk_bytes: int = 1 << 16,
        window: int = 2,
    ):
        check_from_zero("delay_ms", delay_ms)
        check_count("window", window)
        if not 0 < chunk_bytes <= wire.MAX_CHUNK_BYTES:
            raise ConfigError(
                f"chunk_bytes is {chunk_bytes}, expected 1 to {wire.MAX_CHUNK_BYTES}"
            )
        address = numeric_host(host)
        self.peer = peer
        self.traffic = Traffic()
        self._delay_s = delay_ms / 1000
        self._links: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._engine = threading.Lock()  # held by who uses the call sockets
        self._retired: list[zmq.Socket] = []  # call sockets for its holder to close
        self._open: dict[int, Link] = {}  # ticket -> who is to answer
        self._answers: dict[int, np.ndarray | Refused | None] = {}
        self._routers: list[zmq.Socket] = []  # until `serve`
        self._answering: list[Answering] = []
        self._delays: list[DelayLine] = []
        self._closing = threading.Lock()
        self._closed = False
        self._sockets = Sockets(peer, secret)
        self._watch = Watch(self._sockets, self.traffic, self._report, self._retire)
        lose = self._watch.lose
        self._fetcher = Fetcher(self._sockets, lose, self.traffic, chunk_bytes, window)
        try:
            ports = [self._bind(address, port) for port in (calls_port, blocks_port)]
        except ConfigError:
            self._watch.abandon()
            self._sockets.context.destroy(linger=0)
            raise
        self.address = Address(host, *ports)
        self._watch.start()

    def serve(self, handlers: Handlers) -> None:
        answers = answer_calls(handlers), answer_blocks(handlers)
        for name, answer in zip(("calls", "blocks"), answers, strict=True):
            socket = self._routers.pop(0)
            if self._delay_s:
                inside = self._sockets.pair(name, bind=True)
                self._delays.append(DelayLine(socket, inside, self._delay_s))
                socket = self._sockets.pair(name, bind=False)
            thread = Answering(f"moe_edge-{name}", socket, answer, self.traffic)
            self._answering.append(thread)
        for thread in (*self._delays, *self._answering):
            thread.start()

    def connect(self, peer: int, address: Address) -> None:
        self.disconnect(peer)
        calls = self._sockets.dealer(b"c")
        control = self._sockets.dealer(b"o", LINGER_MS)
        link = Link(peer, address, calls, control, monitored(calls))
        for socket in (calls, control):
            socket.connect(f"tcp://{address.host}:{address.calls}")
        self._links[peer] = link
        self._watch.add(link)

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._watch.forget(link)

    def start(self, peer: int, call: Call) -> int:
        number = next(self._numbers)
        frame = wire.encode_call(number, call)
        with self._engine:
            self._bury()
            link = self._link(peer)
            link.calls.send(frame, zmq.NOBLOCK, copy=len(frame) < ZERO_COPY_BYTES)
            self._open[number] = link
            for tickets in (self._open, self._answers):
                if len(tickets) > MAX_OPEN:
                    del tickets[next(iter(tickets))]
        self.traffic.add_sent(peer, Kind.CALL, len(frame))
        return number

    def finish(
        self, tickets: Sequence[int], deadline_s: float
    ) -> list[np.ndarray | None]:
        until_s = time.monotonic() + deadline_s
        with self._engine:
            self._bury()
            for ticket in tickets:
                while ticket not in self._answers:
                    link = self._open[ticket]
                    if link.lost is None and self._receive(link):
                        continue
                    self._check(tickets)
                    if time.monotonic() > until_s:
                        del self._open[ticket]
                        raise PeerLost(link.peer, "overdue")
                if isinstance(self._answers[ticket], Refused):
                    raise self._answers.pop(ticket)
            return [self._answers.pop(ticket) for ticket in tickets]

    def fetch(
        self, peer: int, layer: int, block: int, out: np.ndarray, deadline_s: float
    ) -> bool:
        number = next(self._numbers)
        link = self._link(peer)
        return self._fetcher.fetch(link, number, layer, block, out, deadline_s)

    def control(
        self,
        peer: int,
        name: str,
        fields: dict | None = None,
        arrays: dict[str, np.ndarray] | None = None,
        deadline_s: float = 5.0,
    ) -> tuple[dict, dict[str, np.ndarray]]:
        def encode(number: int) -> bytes:
            return encode_control(
                Kind.CONTROL, number, name, fields or {}, arrays or {}
            )

        return self._watch.ask(self._link(peer), encode, deadline_s)

    def post(
        self,
        peer: int,
        name: str,
        fields: dict | None = None,
        arrays: dict[str, np.ndarray] | None = None,
    ) -> None:
        frame = encode_control(Kind.POST, 0, name, fields or {}, arrays or {})
        link = self._links.get(peer)
        if link is not None:
            self._watch.post(link, frame)

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        ended = []
        for threads in (self._answering, self._delays):  # the last answers pass on
            for thread in threads:
                thread.stop()
            ended += [_ended(thread, END_S) for thread in threads]
        self._watch.stop()
        until_s = time.monotonic() + END_S
        while not _ended(self._watch, 0.01) and time.monotonic() < until_s:
            if self._engine.acquire(timeout=0.01):  # `finish` gives up within a slice
                self._bury()
                self._engine.release()
        if all(ended) and self._watch.clean:
            self._sockets.context.destroy()
        else:
            _left_behind.append(self._sockets.context)

    def _bind(self, host: str, port: int) -> int:
        router, bound = self._sockets.router(host, port)
        self._routers.append(router)
        return bound

    def _link(self, peer: int) -> Link:
        """A peer's link.

        Raises:
          PeerLost: it is lost or unknown.
        """
        link = self._links.get(peer)
        if link is None:
            raise PeerLost(peer, "dead", "is not connected")
        link.check()
        return link

    # The engine's thread, holding the lock.

    def _receive(self, link: Link) -> bool:
        """Takes in one answer; False: none has come for a while."""
        try:
            frame = link.calls.recv()
        except zmq.Again:
            return False
        try:
            kind, _, number = wire.read_prefix(frame)
            if kind == Kind.ROWS:
                answer = wire.decode_rows(frame)
            elif kind == Kind.NOT_HERE:
                answer = None
            elif kind == Kind.ON_ERROR:
                answer = Refused(link.peer, wire.decode_text(frame))
            else:
                raise wire.WireError(unexpected(kind, frame))
        except wire.WireError as error:
            self._watch.lose(link, malformed(link.peer, error))
            return False
        self.traffic.add_received(link.peer, kind, len(frame))
        if self._open.get(number) is link:  # else it was overdue
            del self._open[number]
            self._answers[number] = answer
        return True

    def _check(self, tickets: Sequence[int]) -> None:
        """Raises PeerLost for the first ticket of a lost peer; drops that peer's."""
        for ticket in tickets:
            link = self._open.get(ticket)
            if link is not None and link.lost is not None:
                self._open = {t: k for t, k in self._open.items() if k is not link}
                link.check()

    def _bury(self) -> None:
        """Closes call sockets of lost peers."""
        while self._retired:
            self._retired.pop().close()

    # The watch's thread.

    def _report(self, link: Link) -> None:
        if self.on_lost is not None:
            self.on_lost(link.peer, link.lost().kind)

    def _retire(self, link: Link) -> None:
        """Closes the sockets of others, or leaves that to who is using them."""
        self._retired.append(link.calls)
        if self._engine.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._engine.release()
        if link.block_lock.acquire(blocking=False):
            try:
                if link.blocks is not None:
                    link.blocks.close()
            finally:
                link.block_lock.release()


def _ended(thread: threading.Thread, wait_s: float) -> bool:
    """Whether a thread has ended, after waiting a while."""
    if thread is threading.current_thread():
        return False
    thread.join(wait_s)
    return not thread.is_alive()
