"""Time of a run, in seconds from its start: read from a clock, or computed."""

import heapq
import itertools
import time

from moe_edge.core.checks import ConfigError


class WallClock:
    """Real time. `time.perf_counter` is the one counter behind all of ours."""

    def __init__(self):
        self._start_s = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start_s

    def at(self, counter_s: float) -> float:
        """Run time of an instant that was read from `time.perf_counter`."""
        return counter_s - self._start_s


class EventHeap:
    """Computed time: events in order of time, ties in the order in which they came.

    An event is three small integers, so that millions of them stay cheap.

    Attributes:
      entries: heap of (time, number of entry, kind, where, item); hot loops that know
        what they do push and pop here themselves.
      came: numbers entries.
      now_s: time of the event popped last; it never falls.
    """

    __slots__ = ("came", "entries", "now_s")

    def __init__(self):
        self.entries: list[tuple[float, int, int, int, int]] = []
        self.came = itertools.count()
        self.now_s = 0.0

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, time_s: float, kind: int, where: int = 0, item: int = 0) -> None:
        """Adds an event.

        Raises:
          ConfigError: it lies in the past, or at no time at all (NaN).
        """
        if not time_s >= self.now_s:
            raise ConfigError(
                f"event of kind {kind} at {time_s} s, expected {self.now_s} s or later"
            )
        heapq.heappush(self.entries, (time_s, next(self.came), kind, where, item))

    def pop(self) -> tuple[float, int, int, int]:
        """Moves on to the next event: its time, kind, where and item."""
        time_s, _, kind, where, item = heapq.heappop(self.entries)
        self.now_s = time_s
        return time_s, kind, where, item
