"""The queue of a worker's blocks: copied when asked for, arrived when the link says so.

Order and times are those of an emulated link (`offload/virtual_queue.py`), by the real
clock and without a thread: on a machine that all processes share, a thread that wakes
up for every block took more time than the copies.
"""

import time

from moe_edge.offload.block_queue import Transfer
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slots import Slots
from moe_edge.offload.store import HostStore
from moe_edge.offload.virtual_queue import VirtualQueue


class DatedQueue(VirtualQueue):
    """All methods belong to one thread, which also dispatches what reads the slots.

    Args:
      bytes_per_s: of the link; None: blocks are there as soon as they are copied.
    """

    def __init__(self, store: HostStore, slots: Slots, bytes_per_s: float | None):
        # A link so fast is none: a block takes less than a clock's tick.
        link = EmulatedLink(bytes_per_s or 1e18)
        super().__init__(link, store.block_bytes, store.num_experts)
        self._store, self._slots = store, slots

    @property
    def now_s(self) -> float:
        """The present; to move on to a moment is to wait for it."""
        return time.perf_counter()

    @now_s.setter
    def now_s(self, moment_s: float) -> None:
        while (left_s := moment_s - time.perf_counter()) > 0:
            time.sleep(left_s)  # to the end: others need the core

    def request(
        self, layer: int, expert: int, slot: int, cause: str, step: int | None = None
    ) -> Transfer:
        """As `BlockQueue.request`; the slot has the block when it returns."""
        transfer = super().request(layer, expert, slot, cause, step)
        self._slots.write(slot, self._store.record(layer, expert))
        return transfer

    def promote(self, transfer: Transfer) -> None:
        self.poll()  # what has begun by now is not overtaken
        super().promote(transfer)

    def cancel_prefetches(self, keep=()) -> list[tuple[int, int, int]]:
        self.poll()
        return super().cancel_prefetches(keep)
