"""Process 0: who is there, what processes are told and asked. It serves nothing itself.

What they say, and losses that the transport reports, queue up as events for one thread.
Nothing here waits for a process but questions with a deadline. `serving.py` acts on the
events of a run. The scheduler alone decides who is lost: it asks whoever is accused
itself first (`accusations.py`).
"""

import itertools
import os
import queue
import sys
import time

import numpy as np

from moe_edge.cluster.drills import SIGNALS, Drill
from moe_edge.cluster.node.membership import Reception
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.scheduler.accusations import Inquiries
from moe_edge.cluster.scheduler.event import SAID, Event
from moe_edge.cluster.scheduler.requests import NobodyLeft
from moe_edge.cluster.scheduler.returning import Returning
from moe_edge.cluster.transport.base import HUNG_S, PeerLost, Refused
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError, RequestError

QUESTION_S = 20.0  # deadline of what a server is asked before a run
NOTES_S = 120.0  # of all that it noted, when a run is over
SOON_S = 2.0  # of what it is asked meanwhile
CALLS_S = 30.0  # in which a server that is not stuck ends the calls that it has
NO_LAYER = 2**16 - 1  # of which nobody has a block


class Scheduler:
    """Talks to the other processes: server n is process n + 1, whatever its role.

    Args:
      reception: takes hellos; None where all are known.
      servers: how many there are.
      hung_s: how long one may be silent (`--hung_s`).
      calls_s: in which one that is not stuck has ended the calls that it has.

    Attributes:
      alive_N: bool, who is on the list.
      accusations: and the pairs of servers that do not reach each other.
      returning: lost servers that come back.
      lost_between: (server, kind) of those that were lost while no run was served.
    """

    def __init__(
        self,
        transport: Transport,
        reception: Reception | None,
        servers: int,
        hung_s: float = HUNG_S,
        calls_s: float = CALLS_S,
    ):
        self.transport, self._reception = transport, reception
        self.alive_N = np.ones(servers, bool)
        self._inquiries = Inquiries(self, hung_s, calls_s)
        self.accusations = self._inquiries.accusations
        self.returning = Returning(self, hung_s)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.lost_between: list[tuple[int, str]] = []
        self._numbers = itertools.count(1)
        transport.on_lost = self.on_lost

    # What the transport answers with, in its threads.

    def call(self, peer, call):
        raise RequestError("the scheduler computes no blocks")

    def block(self, layer, block):
        return None

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        """Hellos are answered; all else is an event."""
        if name == "hello" and self._reception is not None:
            return self._reception.hello(peer, fields), {}
        if name not in SAID:
            raise RequestError(f"process {peer} says {name!r}, which means nothing")
        self._events.put(Event(peer - FIRST, name, fields, time.perf_counter()))
        return {}, {}

    def on_lost(self, peer: int, kind: str) -> None:
        """The transport lost a server: the scheduler's own connection to it."""
        self.happened(peer - FIRST, "gone", kind=kind)

    def happened(self, server: int, name: str, **fields) -> None:
        """An event of ours; any thread may tell it."""
        self._events.put(Event(server, name, fields, time.perf_counter()))

    # Talking to servers.

    @property
    def alive(self) -> list[int]:
        return np.flatnonzero(self.alive_N).tolist()

    def is_alive(self, server: int) -> bool:
        """Whether a server is on the list."""
        return 0 <= server < len(self.alive_N) and bool(self.alive_N[server])

    def tell(self, server: int, name: str, fields=None, arrays=None) -> None:
        self.transport.post(FIRST + server, name, fields or {}, arrays or {})

    def new_number(self) -> int:
        """Of an order to prepare; who is ready repeats it."""
        return next(self._numbers)

    def tell_all(self, name: str, fields=None, arrays=None) -> None:
        for server in self.alive:
            self.tell(server, name, fields, arrays)

    def ask(self, server: int, name: str, deadline_s=QUESTION_S):
        """A server's answer (fields, arrays); None if it gives none."""
        try:
            return self.transport.control(FIRST + server, name, deadline_s=deadline_s)
        except (PeerLost, Refused):
            return None

    def lost_as(self, server: int, deadline_s: float) -> str | None:
        """None if a server answers, however long the call that it is at; else how it
        is lost: dead or hung.

        So it is asked for a block that there is none of: blocks have their own thread.
        """
        nothing = np.empty(1, np.uint8)
        try:
            self.transport.fetch(FIRST + server, NO_LAYER, 0, nothing, deadline_s)
        except PeerLost as error:
            if error.kind != "dead":
                return "hung"
            # Or a firewall lets nobody at its blocks.
            there = self.ask(server, "time", deadline_s) is not None
            return None if there else "dead"
        except Refused:
            pass
        return None

    def next_event(self, until_s: float) -> Event | None:
        """What has come; None: nothing, by this time of `time.monotonic`.

        What a server says that is on the list no more is dropped, unless it asks to be
        taken in again. One that says what cannot be read is lost. Of an accusation an
        event comes when it has been looked into.
        """
        while True:
            if (event := self._next(until_s)) is None:
                return None
            if not self.is_alive(event.server):
                is_server = 0 <= event.server < len(self.alive_N)
                if is_server and (event := self.returning.hears(event)) is not None:
                    return event
            elif not event.is_well_formed:
                what = f"{event.name!r} {event.fields}"
                print(f"server {event.server} says {what}; it is lost", file=sys.stderr)
                self.tell(event.server, "stop")  # it must not come back
                return event._replace(name="gone", fields={"kind": "hung"})
            elif event.name == "back":
                if not self.returning.knows(event):  # it has noticed it first
                    return event._replace(name="gone", fields={"kind": "hung"})
            elif not self._inquiries.takes(event):
                return event

    def _next(self, until_s: float) -> Event | None:
        if (found := self._inquiries.next_found()) is not None:
            return found
        try:
            return self._events.get(timeout=max(until_s - time.monotonic(), 0.001))
        except queue.Empty:
            return None

    def wait_for_all(
        self, name: str, timeout_s: float, may_lose: bool = True, **expected: int
    ) -> dict[int, dict]:
        """One post of that name from every server on the list.

        Args:
          may_lose: go on without those that are lost meanwhile.
          expected: fields that it must have; others of that name are old.
        Raises:
          MoeEdgeError: some have not said it in time, or are lost. NobodyLeft: all are.
        """
        until_s, got = time.monotonic() + timeout_s, {}
        while missing := sorted(set(self.alive) - set(got)):
            event = self.next_event(until_s)
            if event is None:
                raise MoeEdgeError(
                    f"servers {missing} have not said {name!r} within {timeout_s:g} s; "
                    "see their logs"
                )
            if event.name == name and event.fields.items() >= expected.items():
                got[event.server] = event.fields
            elif event.name == "gone":
                who, kind = event.server, event.fields["kind"]
                if not self.lose(who):
                    continue
                if not may_lose:
                    raise NobodyLeft(f"server {who} is {kind} before all have begun")
                self.lost_between.append((who, kind))
        return got

    def clock_offsets(self) -> dict[int, float]:
        """Server -> its clock minus ours, by the quickest of some questions."""
        found = {}
        for server in self.alive:
            seen = []  # (seconds of a question, offset)
            for _ in range(5):
                before_s = time.perf_counter()
                if (answer := self.ask(server, "time")) is not None:
                    after_s = time.perf_counter()
                    offset_s = answer[0]["now_s"] - (before_s + after_s) / 2
                    seen.append((after_s - before_s, offset_s))
            if seen:
                found[server] = min(seen)[1]
        return found

    def take_in(self, server: int, fields: dict) -> None:
        """A server is on the list again; the others connect to it."""
        self.tell_all("back", {"server": server} | fields)
        self.alive_N[server] = True

    def lose(self, server: int) -> bool:
        """Takes a server off the list; whether it was on it.

        Raises:
          NobodyLeft: it was the last one.
        """
        if not self.is_alive(server):
            return False
        self.alive_N[server] = False
        self.accusations.forget(server)
        self.tell(server, "away")  # should it be there after all
        self.transport.disconnect(FIRST + server)
        self.tell_all("lost", {"server": server})
        if not self.alive_N.any():
            raise NobodyLeft("all servers are lost; the run cannot continue")
        return True

    def end(self) -> None:
        """All is over, also for those that are on their way back."""
        for server in range(len(self.alive_N)):
            self.tell(server, "stop")

    def strike(self, drill: Drill) -> None:
        """Has a process do or suffer what a drill says."""
        if drill.server is None:
            os.kill(os.getpid(), SIGNALS[drill.kind])
        else:
            fields = {"kind": drill.kind, "servers": self.alive}
            self.tell(drill.server, "strike", fields)

    def notes(self) -> tuple[dict[int, tuple[dict, dict]], list[int]]:
        """What all have noted in a run (facts, arrays); who lives and gave nothing."""
        asked = {server: self.ask(server, "notes", NOTES_S) for server in self.alive}
        notes = {server: answer for server, answer in asked.items() if answer}
        silent = [n for n in self.alive if n not in notes]
        missing = [n for n in silent if self.lost_as(n, SOON_S) is None]
        if missing:
            print(
                f"warning: servers {missing} gave no notes within {NOTES_S:g} s; what "
                "is counted leaves them out",
                file=sys.stderr,
            )
        return notes, missing
