"""A run as the scheduler sees it: requests, their tokens, drills, losses.

One thread takes events and acts on them. The scheduler alone decides who is lost; what
that changes for who computes what is the mode's business (`Holders`), and requests of
the lost go to others.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.cluster.drills import Drill
from moe_edge.cluster.scheduler.requests import ClusterRequest, Failure
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.core.progress import counter
from moe_edge.schedule.to_idle import ToIdle

TICK_S = 0.05
END_S = 30.0  # for what is on its way when the last request has ended


class Seen(NamedTuple):
    """A server as a policy that passes requests on sees it (`schedule.policy.Lane`)."""

    number: int
    idle: bool


class Holders:
    """Who computes what in a run: each mode has its own.

    Attributes:
      actions: what it does about events of its own: (server, fields, at_s).
      under_way: whether something is not finished yet.
      unconfirmed: servers that are waited for then.
    """

    actions: dict[str, Callable[[int, dict, float], None]] = {}
    under_way = False
    unconfirmed: Sequence[int] = ()

    def begin(self, begun_s: float) -> None:
        """The run begins."""

    def tick(self, busy: bool) -> None:
        """Some time has passed; busy: requests are being served."""

    def settle(self) -> None:
        """The last request has ended: nothing new may begin."""

    def repeat(self) -> None:
        """Calls that failed can be made again: their server is there."""

    def apart(self, by: int, who: int) -> int | None:
        """A server cannot reach another one; returns one that is of no use any more.

        Raises:
          NobodyLeft: the run cannot continue so.
        """

    def lost(self, server: int) -> None:
        """A server is gone.

        Raises:
          NobodyLeft: the run cannot continue without it.
        """

    def back(self, server: int) -> bool:
        """A lost server asks to be taken in again; whether it may be."""
        return False

    def returned(self, server: int) -> None:
        """A lost server is on the list again and holds nothing."""


@dataclasses.dataclass
class ServingResult:
    """What came of a run.

    Attributes:
      asked: all requests, with tokens and times.
      failures: servers that were lost.
      begun_s: when it began, by the scheduler's clock.
      notes: server -> (facts, arrays) that it has noted; the lost have none.
      notes_missing: servers that live and gave none.
    """

    asked: list[ClusterRequest]
    failures: list[Failure]
    begun_s: float
    notes: dict[int, tuple[dict, dict]]
    notes_missing: list[int]


class Serving:
    """The events of one run, which begins now.

    Args:
      passes_on: a busy server's new request goes to an idle one, if there is any.

    Attributes:
      failures: servers that were lost.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        holders: Holders,
        asked: Sequence[ClusterRequest],
        drill: Drill | None,
        passes_on: bool = False,
    ):
        self.scheduler, self.holders, self.asked = scheduler, holders, asked
        self.failures: list[Failure] = []
        self.begun_s = time.perf_counter()
        self._drill, self._passes_on = drill, passes_on
        self._coming = sorted(asked, key=lambda one: one.arrival_s)[::-1]
        self._open = {one.id: one for one in asked if not one.ended}
        self._generated = 0
        self._struck_s: float | None = None
        self._resuming: list[tuple[Failure, list[ClusterRequest]]] = []
        self._actions = holders.actions | {
            "token": self._token,
            "failed": self._failed,
            "gone": self._gone,
            "slow": lambda *_: holders.repeat(),
            "together": lambda *_: holders.repeat(),
            "apart": self._apart,
            "back": self._back,
            "returned": self._returned,
        }

    @property
    def now_s(self) -> float:
        """Seconds from the beginning of the run."""
        return time.perf_counter() - self.begun_s

    @property
    def is_over(self) -> bool:
        """Whether every request has ended."""
        return not self._open

    def run(self) -> None:
        """To the last token of the last request, and until nothing is on its way."""
        self.holders.begin(self.begun_s)
        while self.scheduler.lost_between:
            self._replace(*self.scheduler.lost_between.pop(0))
        with counter("requests ended", len(self.asked), bool(self.asked)) as count:
            ended = 0
            while not self.is_over:
                self._send_due()
                self._take_one(min(self._until_next(), TICK_S))
                self.holders.tick(busy=not self.is_over)
                before, ended = ended, len(self.asked) - len(self._open)
                count(ended - before)
        self.holders.settle()
        until_s = time.monotonic() + END_S
        while self.holders.under_way:
            self._take_one(TICK_S)
            if time.monotonic() > until_s:
                for server in self.holders.unconfirmed:
                    self._take_off(server, "hung")
                until_s = time.monotonic() + END_S  # what that changes takes time, too

    def _take_one(self, wait_s: float) -> None:
        event = self.scheduler.next_event(time.monotonic() + wait_s)
        if event is not None and event.name in self._actions:
            self._actions[event.name](event.server, event.fields, event.at_s)

    def _until_next(self) -> float:
        if not self._coming:
            return TICK_S
        return max(self._coming[-1].arrival_s - self.now_s, 0.0)

    def _send_due(self) -> None:
        while self._coming and self._coming[-1].arrival_s <= self.now_s:
            one = self._coming.pop()
            one.arrived_s = time.perf_counter()
            self._send(one)

    def _server_for(self, one: ClusterRequest) -> int:
        """A request's own server, or the next one after it that lives."""
        alive_N = self.scheduler.alive_N
        if self._passes_on and alive_N[one.home]:
            busy = {each.at for each in self._open.values()}
            idle_N = alive_N & ~np.isin(np.arange(len(alive_N)), list(busy - {None}))
            servers = [Seen(n, bool(idle)) for n, idle in enumerate(idle_N)]
            chosen = ToIdle().assign(one, servers, self.now_s)
            one.passed_on = chosen != one.home
            return chosen
        ring = (one.home + np.arange(len(alive_N))) % len(alive_N)
        return int(ring[alive_N[ring]][0])

    def _send(self, one: ClusterRequest) -> None:
        one.at = self._server_for(one)
        fields = {"id": one.id, "max_new_tokens": one.max_new_tokens}
        arrays = {
            "prompt": np.array(one.prompt, np.int32),
            "known": np.array(one.tokens, np.int32),
        }
        self.scheduler.tell(one.at, "request", fields, arrays)

    def _token(self, server: int, fields: dict, at_s: float) -> None:
        one = self._open.get(fields["id"])
        if one is None or one.at != server:
            return
        self._resume(one, at_s)
        one.tokens.append(fields["token"])
        one.times_s.append(at_s)
        one.made_by.append(server)
        one.done = fields["done"]
        if one.done:
            del self._open[one.id]
        self._generated += 1
        drill = self._drill
        if drill is not None and self._generated >= drill.tokens:
            self._drill, self._struck_s = None, self.now_s
            self.scheduler.strike(drill)

    def _resume(self, one: ClusterRequest, at_s: float) -> None:
        """A request's new token may be the first after a loss (`Failure.resumed_s`)."""
        last_s = (one.times_s[-1] if one.times_s else one.arrived_s) - self.begun_s
        for failure, moved in list(self._resuming):
            begun_after = last_s >= failure.detected_s
            if one in moved or (begun_after and all(m.ended for m in moved)):
                failure.resumed_s = at_s - self.begun_s
                self._resuming.remove((failure, moved))

    def _failed(self, server: int, fields: dict, _: float) -> None:
        one = self._open.get(fields["id"])
        if one is not None and one.at == server:
            one.error = fields["error"]
            del self._open[one.id]

    def _gone(self, server: int, fields: dict, _: float) -> None:
        """The scheduler has found a server dead or hung."""
        self._take_off(server, fields["kind"])

    def _apart(self, server: int, fields: dict, _: float) -> None:
        """A server cannot reach another one."""
        if self.scheduler.is_alive(fields["who"]):
            useless = self.holders.apart(server, fields["who"])
            if useless is not None:
                self._take_off(useless, "hung")

    def _back(self, server: int, fields: dict, _: float) -> None:
        """A lost server is there again."""
        if not self.holders.back(server):
            self.scheduler.tell(server, "stop")

    def _returned(self, server: int, fields: dict, at_s: float) -> None:
        """It has nothing left of what it had, and can be given something to do."""
        for failure in self.failures:
            if failure.server == server and failure.returned_s is None:
                failure.returned_s = at_s - self.begun_s
        self.holders.returned(server)

    def _take_off(self, who: int, kind: str) -> None:
        """Takes a server off the list, unless it is lost already."""
        if self.scheduler.lose(who):
            self._replace(who, kind)

    def _replace(self, who: int, kind: str) -> None:
        """Others take over what a lost server had."""
        failure = Failure(who, "dead" if kind == "dead" else "hung", self.now_s)
        failure.struck_s = self._struck_s
        self.failures.append(failure)
        moved = [one for one in self._open.values() if one.at == who]
        self._resuming.append((failure, moved))
        self.holders.lost(who)
        for one in moved:
            self._send(one)
