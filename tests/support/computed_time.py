"""Real threads in computed time: one runs at a time, in the order of a simulator."""

import heapq
import itertools
import threading
from collections import deque

WAIT_S = 300.0  # of this machine, however busy: as long as a whole run may take


class ComputedTime:
    """A clock for `ExpertEngine`: when all threads wait, the time moves on.

    A thread runs until it sleeps or finds its inbox empty; then the next one runs that
    was given something, in the order in which that happened; else the sleeper whose
    time comes first, the main thread before others. None in an inbox ends a thread, and
    wakes it at once.
    """

    def __init__(self, threads: int):
        self._now_s, self._busy, self._lock = 0.0, threads, threading.Lock()
        self._sleepers: list[tuple[float, bool, int, threading.Event]] = []
        self._came, self._ready = itertools.count(), deque()

    def start(self, first_s: float) -> None:
        self._now_s = first_s

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        woken = threading.Event()
        later = threading.current_thread() is not threading.main_thread()
        with self._lock:
            heapq.heappush(self._sleepers, (at_s, later, next(self._came), woken))
            self._wait()
        assert woken.wait(WAIT_S)

    def wake(self) -> None:
        """Who sleeps goes on in its turn."""

    def inbox(self) -> "Inbox":
        return Inbox(self)

    def _wait(self) -> None:
        """A thread is about to wait; the last one lets another one go on."""
        self._busy -= 1
        if self._busy == 0 and (self._ready or self._sleepers):
            if self._ready:
                woken = self._ready.popleft().reader
            else:
                self._now_s, *_, woken = heapq.heappop(self._sleepers)
            self._wake(woken)

    def _wake(self, woken: threading.Event) -> None:
        self._busy += 1
        woken.set()


class Inbox:
    """What is put for a thread; one thread reads it."""

    def __init__(self, time: ComputedTime):
        self._time, self._items, self.reader = time, deque(), None

    def put(self, item) -> None:
        time = self._time
        with time._lock:
            self._items.append(item)
            if item is not None:
                time._ready.append(self)
            elif self.reader is not None:
                time._wake(self.reader)

    def get(self):
        """Also what is there comes in its turn only."""
        time = self._time
        with time._lock:
            if self._items and self._items[0] is None:
                return None
            self.reader = woken = threading.Event()
            time._wait()
        assert woken.wait(WAIT_S)
        self.reader = None
        return self._items.popleft()
