"""What becomes of one process's word that another one is lost.

The scheduler asks the accused over its own connection before it acts. An accused that
answers stays: then the fault is between two servers, and the accuser is told to connect
again. A pair of servers whose connection cannot be made again, or breaks again and
again, is bad: others are asked instead. Bad pairs are tried again from time to time.

`Accusations` decides, without a connection, a thread or a clock of its own; `Inquiries`
does what it decides. The accused are asked in threads, so that nobody else waits for
them.
"""

import collections
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from moe_edge.cluster.scheduler.event import Event

if TYPE_CHECKING:
    from moe_edge.cluster.scheduler.scheduler import Scheduler

AGAIN = 3  # accusations of a pair within WINDOW_S that make it bad, though it connects
WINDOW_S = 600.0
SAME_S = 5.0  # a break is told by the connection and by each call; it counts once
RETRY_S = 60.0  # between attempts to connect a bad pair again


class Ask(NamedTuple):
    """The scheduler is to ask a server itself.

    Attributes:
      calls: ask the thread that answers calls, which one call may keep busy; else the
        one that gives blocks.
    """

    server: int
    calls: bool = False


class Connect(NamedTuple):
    """A server is to connect to another one again and to report whether it could."""

    by: int
    who: int


class Found(NamedTuple):
    """What came out, for who serves a run.

    Attributes:
      name: gone (the server does not answer the scheduler either; fields: kind, dead or
        hung), slow (it answers, but a call to it took longer than its deadline),
        together (it has connected again to `who`; calls can be made again), apart (it
        cannot reach `who`, though both answer the scheduler).
    """

    server: int
    name: str
    fields: dict


Action = Ask | Connect | Found


class Accusations:
    """Accusations that are being looked into, and pairs that were found bad.

    Every method returns what is to be done now.

    Args:
      now_s: a clock.

    Attributes:
      bad: (server, server that it cannot reach); the other direction may be good.
      found_bad: every pair that ever was, in order.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s = now_s
        self.bad: set[tuple[int, int]] = set()
        self.found_bad: list[tuple[int, int]] = []
        self._asked: dict[Ask, list[tuple[int, str]]] = {}  # -> (accuser, kind)
        self._connecting: set[tuple[int, int]] = set()
        self._times_s: dict[tuple[int, int], list[float]] = {}  # of accusations
        self._tried_s: dict[tuple[int, int], float] = {}

    def accuse(self, by: int, who: int, kind: str) -> list[Action]:
        """A server says that another one is lost.

        Args:
          kind: dead or hung (its connection ended), overdue (a call has passed its
            deadline, but goes on), unanswered (so has the last attempt of a call).
        """
        pair = by, who
        if by == who or pair in self.bad or self._is_connecting(pair):
            return []  # nobody accuses itself; the others are known
        question = Ask(who, calls=kind == "unanswered")
        known = question in self._asked
        self._asked.setdefault(question, []).append((by, kind))
        return [] if known else [question]

    def answered(self, question: Ask, lost: str | None) -> list[Action]:
        """What came of a question to an accused.

        Args:
          lost: None if it has answered, else dead or hung.
        """
        accusers = self._asked.pop(question, [])
        if lost is not None:
            return [Found(question.server, "gone", {"kind": lost})]
        actions: list[Action] = []
        if any(kind == "overdue" for _, kind in accusers):
            actions.append(Found(question.server, "slow", {}))
        for by in dict.fromkeys(by for by, kind in accusers if kind != "overdue"):
            pair, now_s = (by, question.server), self._now_s()
            times_s = self._recent(pair)
            if not times_s or times_s[-1] < now_s - SAME_S:
                times_s.append(now_s)
            self._times_s[pair] = times_s
            if question.calls:  # it had several attempts already
                actions += self._set_bad(pair)
            else:
                actions += self._connect(pair)
        return actions

    def connected(self, by: int, who: int, reached: bool) -> list[Action]:
        """A server reports whether it could connect to another one again."""
        pair, was_bad = (by, who), (by, who) in self.bad
        if pair not in self._connecting:
            return []
        self._connecting.discard(pair)
        if reached and len(self._recent(pair)) < AGAIN:
            self.bad.discard(pair)
            return [Found(by, "together", {"who": who})]
        return [] if was_bad else self._set_bad(pair)

    def due(self) -> list[Action]:
        """Bad pairs that are to be tried again."""
        before_s = self._now_s() - RETRY_S
        due = [p for p in sorted(self.bad) if self._tried_s[p] <= before_s]
        return [action for pair in due for action in self._connect(pair)]

    def forget(self, server: int) -> None:
        """A server is lost: nothing about it matters any more."""
        self._asked = {
            question: [one for one in accusers if one[0] != server]
            for question, accusers in self._asked.items()
            if question.server != server
        }
        self.bad = _without(server, self.bad)
        self._connecting = _without(server, self._connecting)
        for times in (self._times_s, self._tried_s):
            for pair in [p for p in times if server in p]:
                del times[pair]

    def _is_connecting(self, pair: tuple[int, int]) -> bool:
        """An accuser that never reports is not waited for without end."""
        since_s = self._now_s() - RETRY_S
        return pair in self._connecting and self._tried_s[pair] > since_s

    def _connect(self, pair: tuple[int, int]) -> list[Action]:
        self._connecting.add(pair)
        self._tried_s[pair] = self._now_s()
        return [Connect(*pair)]

    def _set_bad(self, pair: tuple[int, int]) -> list[Action]:
        self.bad.add(pair)
        if pair not in self.found_bad:
            self.found_bad.append(pair)
        self._tried_s[pair] = self._now_s()
        return [Found(pair[0], "apart", {"who": pair[1]})]

    def _recent(self, pair: tuple[int, int]) -> list[float]:
        since_s = self._now_s() - WINDOW_S
        return [t for t in self._times_s.get(pair, ()) if t > since_s]


def _without(server: int, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    return {pair for pair in pairs if server not in pair}


class Inquiries:
    """What is being looked into, and what was found and nobody has taken yet.

    Args:
      hung_s: how long an accused may be silent.
      calls_s: in which one that is not stuck has ended the calls that it has.

    Attributes:
      accusations: and the pairs of servers that do not reach each other.
    """

    def __init__(self, scheduler: "Scheduler", hung_s: float, calls_s: float):
        self._scheduler, self._hung_s, self._calls_s = scheduler, hung_s, calls_s
        self.accusations = Accusations()
        self._found: collections.deque[Event] = collections.deque()

    def next_found(self) -> Event | None:
        """The next thing that was found, for who serves; None: nothing."""
        self._act(self.accusations.due())
        return self._found.popleft() if self._found else None

    def takes(self, event: Event) -> bool:
        """Whether an event is a part of an inquiry, which then goes on."""
        accusations, fields, by = self.accusations, event.fields, event.server
        if event.name == "lost":
            if self._scheduler.is_alive(fields["who"]):
                self._act(accusations.accuse(by, fields["who"], fields["kind"]))
        elif event.name == "asked":
            self._act(accusations.answered(fields["question"], fields["lost"]))
        elif event.name == "reached":
            self._act(accusations.connected(by, fields["who"], fields["reached"]))
        else:
            return False
        return True

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    args = [action]
                    threading.Thread(target=self._ask, args=args, daemon=True).start()
                case Connect(by, who):
                    fields = {"server": who, "within_s": self._hung_s}
                    self._scheduler.tell(by, "reach", fields)
                case Found(server, name, fields):
                    self._found.append(Event(*action, time.perf_counter()))
                    if name == "apart":
                        print(
                            f"warning: server {server} cannot reach server "
                            f"{fields['who']}, though both answer the scheduler; "
                            "others are asked instead",
                            file=sys.stderr,
                        )

    def _ask(self, question: Ask) -> None:
        """Asks an accused."""
        scheduler, server, lost = self._scheduler, question.server, None
        if not question.calls:
            lost = scheduler.lost_as(server, self._hung_s)
        elif scheduler.ask(server, "time", self._calls_s) is None:
            lost = "hung"
        scheduler.happened(server, "asked", question=question, lost=lost)
