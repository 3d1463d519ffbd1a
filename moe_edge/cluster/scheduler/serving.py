"""A method's run as the scheduler sees it: requests, their tokens, drills, losses.

One thread takes events and acts on them. The scheduler alone decides who is lost; what
it decides goes to the keeper of the table, and requests of the lost go to survivors.
"""

import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.cluster.prism.table_keeper import TableKeeper
from moe_edge.cluster.scheduler.asked import Asked, Drill, Failure
from moe_edge.core.checks import MoeEdgeError

if TYPE_CHECKING:
    from moe_edge.cluster.scheduler.scheduler import Scheduler

TICK_S = 0.05
END_S = 30.0  # for what is on its way when the last request has ended


class Serving:
    """The events of one method's run.

    Attributes:
      failures: servers that were lost.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        keeper: TableKeeper,
        asked: Sequence[Asked],
        drill: Drill | None,
        begun_s: float,
    ):
        self.scheduler, self.keeper, self.asked = scheduler, keeper, asked
        self.failures: list[Failure] = []
        self._drill, self._begun_s = drill, begun_s
        self._coming = sorted(asked, key=lambda one: one.arrival_s)[::-1]
        self._by_id = {one.id: one for one in asked}
        self._generated = 0
        self._struck_s: float | None = None
        self._resuming: list[tuple[Failure, list[Asked]]] = []
        self._actions = {
            "token": self._token,
            "failed": self._failed,
            "lost": self._lost,
            "arrived": keeper.arrived,
            "confirmed": keeper.confirmed,
        }

    @property
    def now_s(self) -> float:
        """Seconds from the beginning of the run."""
        return time.perf_counter() - self._begun_s

    def run(self) -> None:
        """To the last token of the last request, and until nothing is on its way."""
        while not all(one.ended for one in self.asked):
            self._send_due()
            self._take_one(min(self._until_next(), TICK_S))
            self.keeper.tick(busy=not all(one.ended for one in self.asked))
        self.keeper.settle()
        until_s = time.monotonic() + END_S
        while self.keeper.under_way:
            self._take_one(TICK_S)
            if time.monotonic() > until_s:
                for server in self.keeper.unconfirmed:
                    self.take_off(server, "hung")

    def _take_one(self, wait_s: float) -> None:
        event = self.scheduler.next_event(time.monotonic() + wait_s)
        if event is None or event.name not in self._actions:
            return
        try:
            self._actions[event.name](event.server, event.fields, event.at_s)
        except MoeEdgeError:  # such as that nobody is left
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            traceback.print_exc()
            what = f"{event.name!r} {event.fields}"
            print(f"server {event.server} says {what}; it is lost", file=sys.stderr)
            self.take_off(event.server, "hung")

    def _until_next(self) -> float:
        if not self._coming:
            return TICK_S
        return max(self._coming[-1].arrival_s - self.now_s, 0.0)

    def _send_due(self) -> None:
        while self._coming and self._coming[-1].arrival_s <= self.now_s:
            one = self._coming.pop()
            one.arrived_s = time.perf_counter()
            self._send(one)

    def _send(self, one: Asked) -> None:
        """To its server, or to the next one after it that lives."""
        alive_N = self.scheduler.alive_N
        ring = (one.home + np.arange(len(alive_N))) % len(alive_N)
        one.at = int(ring[alive_N[ring]][0])
        fields = {"id": one.id, "max_new_tokens": one.max_new_tokens}
        arrays = {
            "prompt": np.array(one.prompt, np.int32),
            "known": np.array(one.tokens, np.int32),
        }
        self.scheduler.tell(one.at, "request", fields, arrays)

    def _token(self, server: int, fields: dict, at_s: float) -> None:
        one = self._by_id.get(fields["id"])
        if one is None or one.at != server or one.ended:
            return
        token, done = int(fields["token"]), bool(fields["done"])
        self._resume(one, at_s)
        one.tokens.append(token)
        one.times_s.append(at_s)
        one.done = done
        self._generated += 1
        drill = self._drill
        if drill is not None and self._generated >= drill.tokens:
            self._drill, self._struck_s = None, self.now_s
            self.scheduler.strike(drill)

    def _resume(self, one: Asked, at_s: float) -> None:
        """A request's new token may be the first after a loss (`Failure.resumed_s`)."""
        last_s = (one.times_s[-1] if one.times_s else one.arrived_s) - self._begun_s
        for failure, moved in list(self._resuming):
            begun_after = last_s >= failure.detected_s
            if one in moved or (begun_after and all(m.ended for m in moved)):
                failure.resumed_s = at_s - self._begun_s
                self._resuming.remove((failure, moved))

    def _failed(self, server: int, fields: dict, _: float) -> None:
        one = self._by_id.get(fields["id"])
        if one is not None and one.at == server and not one.ended:
            one.error = fields["error"]

    def _lost(self, _: int, fields: dict, at_s: float) -> None:
        """Somebody finds a server dead or hung, or a call overdue."""
        who, kind = fields["who"], fields["kind"]
        if not self.scheduler.is_alive(who):
            return
        if kind == "overdue" and self.scheduler.answers(who):
            self.keeper.repeat()  # only slow: whoever waits asks again
        else:
            self.take_off(who, kind)

    def take_off(self, who: int, kind: str) -> None:
        """Takes a server off the list, unless it is lost already."""
        if self.scheduler.lose(who):
            self.replace(who, kind)

    def replace(self, who: int, kind: str) -> None:
        """Others take over what a lost server had."""
        failure = Failure(who, "dead" if kind == "dead" else "hung", self.now_s)
        failure.struck_s = self._struck_s
        self.failures.append(failure)
        moved = [one for one in self.asked if one.at == who and not one.ended]
        self._resuming.append((failure, moved))
        self.keeper.lost(who)
        for one in moved:
            self._send(one)
