"""What becomes of one process's word that another one is lost.

The scheduler asks the accused over its own connection before it acts. An accused that
answers stays: then the fault is between two servers, and the accuser is told to connect
again. A pair of servers whose connection cannot be made again, or breaks again and
again, is bad: others are asked instead. Bad pairs are tried again from time to time.

This file decides only. It has no connection, thread or clock of its own.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable

AGAIN = 3  # accusations of a pair within WINDOW_S that make it bad, though it connects
WINDOW_S = 600.0
SAME_S = 5.0  # a break is told by the connection and by each call; it counts once
RETRY_S = 60.0  # between attempts to connect a bad pair again


@dataclasses.dataclass(frozen=True)
class Ask:
    """The scheduler is to ask a server itself.

    Attributes:
      calls: ask the thread that answers calls, which one call may keep busy; else the
        one that gives blocks.
    """

    server: int
    calls: bool = False


@dataclasses.dataclass(frozen=True)
class Connect:
    """A server is to connect to another one again and to report whether it could."""

    by: int
    who: int


@dataclasses.dataclass(frozen=True)
class Lost:
    """A server does not answer the scheduler either; kind: dead or hung."""

    server: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Slow:
    """A server answers, but a call to it took longer than its deadline."""

    server: int


@dataclasses.dataclass(frozen=True)
class Together:
    """A server has connected to another one again; its calls can be made again."""

    by: int
    who: int


@dataclasses.dataclass(frozen=True)
class Apart:
    """A server cannot reach another one, though both answer the scheduler."""

    by: int
    who: int


Action = Ask | Connect | Lost | Slow | Together | Apart


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
            return [Lost(question.server, lost)]
        actions: list[Action] = []
        if any(kind == "overdue" for _, kind in accusers):
            actions.append(Slow(question.server))
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
            return [Together(by, who)]
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
        return [Apart(*pair)]

    def _recent(self, pair: tuple[int, int]) -> list[float]:
        since_s = self._now_s() - WINDOW_S
        return [t for t in self._times_s.get(pair, ()) if t > since_s]


def _without(server: int, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    return {pair for pair in pairs if server not in pair}
