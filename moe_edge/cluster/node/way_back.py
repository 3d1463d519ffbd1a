"""How a process that the scheduler has lost asks to be taken in again."""

import threading
import time
from collections.abc import Callable

from moe_edge.cluster.node.node import SchedulerLost
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.messages.transport import Transport

BACK_S = 60.0  # until the order to return, and from that until it is taken in
AGAIN_S, REACH_S = 1.0, 2.0  # between two attempts; for one of them


class WayBack:
    """Says `back` until it is told that it is taken in.

    With it goes the number of the last order to return, 0 if there was none since the
    scheduler was lost: so the scheduler knows what it says from before that order.

    Args:
      failed: is told if nobody takes it in.
    """

    def __init__(self, transport: Transport, failed: Callable[[BaseException], None]):
        self._transport, self._failed = transport, failed
        self._lock, self._number, self._until_s = threading.Lock(), 0, 0.0
        self._ended = threading.Event()  # of one way back
        self._ended.set()

    def begin(self) -> None:
        """The scheduler is lost: asks, in a thread of its own, unless it does already.

        It may be lost once more on the way: then an order to return does not count.
        """
        with self._lock:
            self._number = 0
            if self._ended.is_set():
                self._until_s = time.monotonic() + BACK_S
                self._ended = threading.Event()
                args = [self._ended]
                threading.Thread(target=self._ask, args=args, daemon=True).start()

    def returning(self, number: int) -> None:
        """It obeys an order to return."""
        with self._lock:
            self._number, self._until_s = number, time.monotonic() + BACK_S

    def taken_in(self, number: int) -> None:
        """By an order to return it has been taken in."""
        with self._lock:
            if number == self._number:
                self._ended.set()

    def end(self) -> None:
        """It need not be taken in any more."""
        with self._lock:
            self._ended.set()

    def _ask(self, ended: threading.Event) -> None:
        while not ended.is_set():
            reached = self._transport.reach(SCHEDULER, REACH_S)
            with self._lock:
                if reached and not ended.is_set():
                    number = {"number": self._number}
                    self._transport.post(SCHEDULER, "back", number)
            if not reached and self._transport.refuses(SCHEDULER):
                return self._fail(ended, "has ended; so does this process")
            if ended.wait(AGAIN_S):
                return
            if time.monotonic() > self._until_s:
                what = f"has not taken this process in again within {BACK_S:g} s"
                return self._fail(ended, f"{what}; it ends")

    def _fail(self, ended: threading.Event, what: str) -> None:
        if not ended.is_set():
            self._failed(SchedulerLost(f"the scheduler {what}"))
