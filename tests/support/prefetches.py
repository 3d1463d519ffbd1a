"""What is asked for ahead, and links that are free when a test says so, not the clock.

A prefetch that nobody carries in time is taken back, or becomes a demand. So how many
*travel* is a matter of how threads are scheduled, and tests count what is asked for, or
say when blocks travel.
"""

import math

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.link import TransferLink


def note_prefetches(queue: BlockQueue, at_once: bool = False) -> list[int]:
    """How many blocks each request asks for ahead, from here on, in their order.

    Args:
      at_once: they have arrived when the request returns, also where a thread carries.
    """
    ask, asked = queue.request_all, []

    def request_all(blocks, cause, step=None):
        transfers = ask(blocks, cause, step)
        if cause == "prefetch":
            asked.append(len(blocks))
            if at_once:
                queue.wait(transfers)
        return transfers

    queue.request_all = request_all
    return asked


class LazyLink(TransferLink):
    """Carries what is waited for; every `period`-th time that the caller looks, more.

    For a carrier without a thread: what has travelled is then the same in each run.
    """

    def __init__(self, period: int):
        self._period, self._looks = period, 0

    @property
    def free_s(self) -> float:
        """Long ago, or not yet."""
        self._looks += 1
        return 0.0 if self._looks % self._period == 0 else math.inf
