"""Calls of the engine's thread: it sends them and reads their rows itself.

A thread of its own in between would cost two hand-overs a call.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Answered, Call, PeerLost, Refused, Traffic
from moe_edge.cluster.transport.messages.answer import ZERO_COPY_BYTES
from moe_edge.cluster.transport.messages.peer_link import (
    PeerLink,
    malformed,
    unexpected,
)
from moe_edge.cluster.transport.messages.sockets import SLICE_MS
from moe_edge.cluster.transport.wire import Kind

MAX_OPEN = 4096  # tickets not yet collected


class Calls:
    """Tickets of calls and their answers.

    Args:
      link: of a peer's number, or raises PeerLost.
      lose: gives a link up.
    """

    def __init__(
        self,
        link: Callable[[int], PeerLink],
        lose: Callable[[PeerLink, Callable[[], PeerLost]], None],
        traffic: Traffic,
    ):
        self._link, self._lose, self._traffic = link, lose, traffic
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # held by who uses the call sockets
        self._retired: list[zmq.Socket] = []  # for the lock's holder to close
        self._open: dict[int, PeerLink] = {}  # ticket -> who is to answer
        self._answers: dict[int, Answered | Refused] = {}

    def start(self, peer: int, call: Call) -> int:
        """Sends a call and returns at once.

        Returns:
          A ticket for `finish`.
        Raises:
          PeerLost: the peer is lost, or unknown.
        """
        number = next(self._numbers)
        frame = wire.encode_call(number, call)
        with self._lock:
            self._bury()
            link = self._link(peer)
            link.calls.send(frame, zmq.NOBLOCK, copy=len(frame) < ZERO_COPY_BYTES)
            self._open[number] = link
            for tickets in (self._open, self._answers):
                if len(tickets) > MAX_OPEN:
                    del tickets[next(iter(tickets))]
        self._traffic.add_sent(peer, Kind.CALL, len(frame))
        return number

    def finish(self, tickets: Sequence[int], deadline_s: float) -> list[Answered]:
        """Waits for the answers of all tickets.

        Meanwhile it takes in those of other tickets, too. Where one fails, it raises at
        once; the other tickets, and a failed one's peers, stay good. A ticket that is
        never collected is forgotten after some thousand calls.

        Raises:
          PeerLost: a peer is lost, or has not answered after `deadline_s`.
          Refused: the peer's handler raised.
        """
        until_s = time.monotonic() + deadline_s
        with self._lock:
            self._bury()
            for ticket in tickets:
                while ticket not in self._answers:
                    link = self._open[ticket]
                    if self._receive():
                        continue
                    self._check(tickets)
                    if time.monotonic() > until_s:
                        del self._open[ticket]
                        raise PeerLost(link.peer, "overdue")
                if isinstance(self._answers[ticket], Refused):
                    raise self._answers.pop(ticket)
            return [self._answers.pop(ticket) for ticket in tickets]

    def retire(self, calls: zmq.Socket) -> None:
        """Closes a call socket, or leaves that to who is using them (any thread)."""
        self._retired.append(calls)
        self.bury(0)

    def bury(self, wait_s: float) -> None:
        """Closes retired sockets, if the lock comes free within that time."""
        if self._lock.acquire(timeout=wait_s):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _receive(self) -> bool:
        """Takes in what has come of any peer; False: nothing for a while."""
        links = [k for k in dict.fromkeys(self._open.values()) if k.lost is None]
        if len(links) < 2:  # a poll would only cost time
            return any(self._take(link, 0) for link in links)
        waiting = [(link.calls, zmq.POLLIN) for link in links]
        ready = {socket for socket, _ in zmq.zmq_poll(waiting, SLICE_MS)}
        some = [link for link in links if link.calls in ready]
        return any([self._take(link, zmq.NOBLOCK) for link in some])

    def _take(self, link: PeerLink, flags: int) -> bool:
        """Takes in one answer of a peer."""
        try:
            frame = link.calls.recv(flags)
        except zmq.Again:
            return False
        at_s = time.perf_counter()
        try:
            kind, _, number = wire.read_prefix(frame)
            if kind == Kind.ROWS:
                answer = Answered(wire.decode_rows(frame), at_s)
            elif kind == Kind.NOT_HERE:
                answer = Answered(None, at_s)
            elif kind == Kind.ON_ERROR:
                answer = Refused(link.peer, wire.decode_text(frame))
            else:
                raise wire.WireError(unexpected(kind, frame))
        except wire.WireError as error:
            self._lose(link, malformed(link.peer, error))
            return False
        self._traffic.add_received(link.peer, kind, len(frame))
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
