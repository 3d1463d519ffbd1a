"""The thread that watches connections, admits others, and carries control messages.

It owns a process's control sockets, the monitors of its call sockets, and the socket by
which ZeroMQ asks whether a client's key is good. It runs no handler.

A connection that ends is lost for good. ZeroMQ does not say why it ended, but what
comes of its own attempt to connect again does: refused = the process is dead; accepted
by the kernel, or no answer = it hangs (its heartbeats were missing). An attempt that
fails at once may also find no network: so it is made once more, to see why.
"""

import concurrent.futures
import itertools
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import (
    PeerLost,
    Refused,
    SecretRefused,
    Traffic,
)
from moe_edge.cluster.transport.messages.peer_link import (
    PeerLink,
    malformed,
    unexpected,
)
from moe_edge.cluster.transport.messages.sockets import ZAP_DOMAIN, Sockets
from moe_edge.cluster.transport.wire import Kind
from moe_edge.cluster.transport.wire_control import decode_control, encode_control

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # ZeroMQ's name for it

# A peer that was killed in its handshake fails it, too, but not again and again.
MAX_HANDSHAKES = 3
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
END_S = 0.5  # for monitors to end
BROKEN_S = 0.3  # for an attempt to connect again to tell dead from hung


class Watch(threading.Thread):
    """Runs until `stop`; other threads give it work by `submit`.

    Attributes:
      clean: it has ended and closed all its sockets.

    Args:
      on_lost: told a lost link, whose `lost` is set.
      retire: told a link whose sockets of other threads are to be closed.
    """

    def __init__(
        self,
        sockets: Sockets,
        traffic: Traffic,
        on_lost: Callable[[PeerLink], None],
        retire: Callable[[PeerLink], None],
    ):
        super().__init__(name="moe_edge-watch", daemon=True)
        self._client_key = z85.decode(sockets.keys.client.public)
        self._traffic = traffic
        self._on_lost = on_lost
        self._retire = retire
        self._work: deque[Callable[[], None]] = deque()
        self._waiting: dict[int, tuple[PeerLink, concurrent.futures.Future]] = {}
        self._numbers = itertools.count(1)
        self._broken: set[PeerLink] = set()
        self._stopping = threading.Event()
        self.clean = False
        self._lock = threading.Lock()  # of `PeerLink.lost`
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._zap = sockets.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._readers: dict = {self._zap: self._admit, self._woken.fileno(): self._do}
        self._poller = zmq.Poller()
        for one in self._readers:
            self._poller.register(one, zmq.POLLIN)

    # Called by any thread.

    def submit(self, work: Callable[[], None]) -> None:
        """Has something done by this thread, in order."""
        self._work.append(work)
        try:
            self._wake.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake, or has ended

    def add(self, link: PeerLink) -> None:
        """Begins to watch a link."""
        self.submit(lambda: self._add(link))

    def forget(self, link: PeerLink) -> None:
        """Drops a link without a report."""
        with self._lock:
            link.forgotten = True
            if link.lost is None:
                link.lost = lambda: PeerLost(link.peer, "dead", "was disconnected")
        self.submit(lambda: self._drop(link))

    def lose(self, link: PeerLink, make: Callable[[], PeerLost]) -> None:
        """Gives a link up and reports it, unless that has happened."""
        with self._lock:
            if link.lost is not None:
                return
            link.lost = make
        self.submit(lambda: self._report(link))

    def post(self, link: PeerLink, frame: bytes) -> None:
        """Sends a control message."""
        self.submit(lambda: self._send(link, frame))

    def ask(self, link: PeerLink, asked: tuple, deadline_s: float) -> tuple[dict, dict]:
        """Sends a control message and waits for its answer.

        Args:
          asked: its name, fields and arrays.
        Raises:
          PeerLost, Refused.
        """
        number = next(self._numbers)
        frame = encode_control(Kind.CONTROL, number, *asked)
        future: concurrent.futures.Future = concurrent.futures.Future()

        def ask():
            if link.lost is not None:
                return future.set_exception(link.lost())
            self._waiting[number] = link, future
            self._send(link, frame)

        self.submit(ask)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            self.submit(lambda: self._waiting.pop(number, None))
            link.check()
            raise PeerLost(link.peer, "overdue") from None

    def stop(self) -> None:
        """Ends the thread, once call sockets are closed; given work is done first."""
        self.submit(self._stopping.set)

    def abandon(self) -> None:
        """Closes what a watch holds that was never started."""
        self.clean = True
        self._end()

    # Called by this thread only.

    def run(self) -> None:
        until_s = None
        while True:
            for one, _ in self._poller.poll(50 if self._broken or until_s else None):
                reader = self._readers.get(one)  # an earlier one may have closed it
                if reader is not None:
                    self._guarded(reader)
            now_s = time.monotonic()
            for link in [k for k in self._broken if now_s - k.broken_s > BROKEN_S]:
                self._lose_as(link, "hung")
            if self._stopping.is_set():
                until_s = until_s or now_s + END_S
                # A monitor is read to its end: ZeroMQ's thread might wait for it.
                self.clean = len(self._readers) == 2
                if self.clean or now_s > until_s:
                    break
        self._end()

    def _end(self) -> None:
        if self.clean:
            self._close(self._zap)
        for link, future in self._waiting.values():
            future.set_exception(PeerLost(link.peer, "dead", "was disconnected"))
        self._wake.close()
        self._woken.close()

    def _guarded(self, reader: Callable[[], None]) -> None:
        """A fault in one connection must not end the others."""
        try:
            reader()
        except Exception:
            traceback.print_exc()

    def _do(self) -> None:
        while True:
            try:
                self._woken.recv(4096)
            except BlockingIOError:
                break
        while self._work:
            self._guarded(self._work.popleft())

    def _admit(self) -> None:
        """ZeroMQ's question (RFC 27) whether a client may connect."""
        _, request, domain, _, _, mechanism, *credentials = self._zap.recv_multipart()
        good = (
            domain == ZAP_DOMAIN
            and mechanism == b"CURVE"
            and credentials == [self._client_key]
        )
        status = (b"200", b"OK") if good else (b"400", b"another secret")
        self._zap.send_multipart([b"1.0", request, *status, b"", b""])

    def _add(self, link: PeerLink) -> None:
        self._readers[link.control] = lambda: self._read_control(link)
        self._readers[link.monitor] = lambda: self._read_event(link)
        self._poller.register(link.control, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _close(self, one: zmq.Socket) -> None:
        if self._readers.pop(one, None) is not None:
            self._poller.unregister(one)
        one.close()

    def _send(self, link: PeerLink, frame: bytes) -> None:
        if not link.control.closed:
            link.control.send(frame, zmq.NOBLOCK)
            self._traffic.add_sent(link.peer, frame[wire.KIND_AT], len(frame))

    def _read_control(self, link: PeerLink) -> None:
        try:
            frame = link.control.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            kind, _, number = wire.read_prefix(frame)
            if kind == Kind.REPLY:
                _, *answer = decode_control(frame)
            elif kind != Kind.ON_ERROR:
                raise wire.WireError(unexpected(kind, frame))
        except wire.WireError as error:
            self.lose(link, malformed(link.peer, error))
            return
        self._traffic.add_received(link.peer, kind, len(frame))
        asked, future = self._waiting.get(number, (None, None))
        if asked is not link:
            return  # nobody waits for it any longer
        del self._waiting[number]
        if kind == Kind.REPLY:
            future.set_result(tuple(answer))
        else:
            future.set_exception(Refused(link.peer, wire.decode_text(frame)))

    def _read_event(self, link: PeerLink) -> None:
        event = parse_monitor_message(link.monitor.recv_multipart())["event"]
        if event == zmq.EVENT_MONITOR_STOPPED:
            self._close(link.monitor)
        elif link.lost is not None:
            return
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.state, link.handshakes = "ready", 0
        elif event in HANDSHAKE_FAILED:
            is_vague = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            link.handshakes += 1 if is_vague else MAX_HANDSHAKES
            if link.handshakes >= MAX_HANDSHAKES:
                self.lose(link, lambda: SecretRefused(link.peer, link.address))
        elif event == zmq.EVENT_DISCONNECTED and link.state == "ready":
            link.state, link.broken_s = "broken", time.monotonic()
            self._broken.add(link)
        elif link.state == "broken":
            dead = event == zmq.EVENT_CLOSED and link.address.refuses(BROKEN_S)
            self._lose_as(link, "dead" if dead else "hung")

    def _lose_as(self, link: PeerLink, kind: str) -> None:
        self._broken.discard(link)
        self.lose(link, lambda: PeerLost(link.peer, kind))

    def _report(self, link: PeerLink) -> None:
        self._drop(link)
        if not link.forgotten:
            self._on_lost(link)

    def _drop(self, link: PeerLink) -> None:
        self._broken.discard(link)
        if not link.control.closed:
            if not link.forgotten:
                link.control.linger = 0  # nobody takes what still waits
            self._close(link.control)
        for number, (asked, future) in list(self._waiting.items()):
            if asked is link:
                del self._waiting[number]
                future.set_exception(link.lost())
        self._retire(link)
