"""How a process that the scheduler has lost asks to be taken in again."""

import threading
import time
from collections.abc import Callable

from moe_edge.cluster.node.node import SchedulerLost
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.transport.base import Transport

BACK_S = 60.0  # in which it must be taken in
AGAIN_S, REACH_S = 1.0, 2.0  # between two attempts; for one of them


class WayBack:
    """Says `back` until `end`.

    Args:
      failed: is told if nobody takes it in.
    """

    def __init__(self, transport: Transport, failed: Callable[[BaseException], None]):
        self._transport, self._failed = transport, failed
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._ended.set()

    def begin(self) -> None:
        """Begins to ask, in a thread of its own, unless it does already."""
        with self._lock:
            if self._ended.is_set():
                self._ended.clear()
                threading.Thread(target=self._ask, daemon=True).start()

    def end(self) -> None:
        """It has been taken in, or need not be any more."""
        self._ended.set()

    def _ask(self) -> None:
        until_s = time.monotonic() + BACK_S
        while not self._ended.is_set():
            if self._transport.reach(SCHEDULER, REACH_S):
                self._transport.post(SCHEDULER, "back")
            if self._ended.wait(AGAIN_S):
                return
            if time.monotonic() > until_s:
                self._failed(
                    SchedulerLost(
                        f"the scheduler has not taken this process in again within "
                        f"{BACK_S:g} s; it ends"
                    )
                )
                return
