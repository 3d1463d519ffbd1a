"""A worker's blocks arrive when the link says so.

Order and times are those of an emulated link (`offload/computed_carrier.py`), by the
real clock and without a thread: on a machine that all processes share, a thread that
wakes up for every block took more time than the copies. Copies are made when there is
time (`copy`), at the latest when somebody waits for them.
"""

import time
from collections.abc import Iterable, Sequence

from moe_edge.offload.carrier import Transfer
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slots import Slots
from moe_edge.offload.store import HostStore


class DatedCarrier(ComputedCarrier):
    """All methods belong to one thread, which also dispatches what reads the slots.

    Args:
      bytes_per_s: of the link; None: blocks are there as soon as they are copied.
    """

    def __init__(self, store: HostStore, slots: Slots, bytes_per_s: float | None):
        # A link so fast is none: a block takes less than a clock's tick.
        link = EmulatedLink(bytes_per_s or 1e18, merges=False)
        given = link, store.block_bytes, store.num_experts
        super().__init__(*given, clock=lambda: time.perf_counter())
        self._store, self._slots = store, slots
        self._uncopied: list[Transfer] = []

    def _move_on(self, moment_s: float) -> None:
        """To move on to a moment is to wait for it."""
        while (left_s := moment_s - time.perf_counter()) > 0:
            time.sleep(left_s)  # to the end: others need the core

    def catch_up(self) -> None:
        self.poll()

    def ask(self, cause: str, transfers: Sequence[Transfer]) -> None:
        super().ask(cause, transfers)
        self._uncopied += transfers

    def copy(self) -> None:
        """Puts what was asked for into the slots; its arrival is another matter."""
        for transfer in self._uncopied:  # in order: a slot's last one stays
            if transfer.state != "cancelled":
                record_R = self._store.record(transfer.layer, transfer.expert)
                self._slots.write(transfer.slot, record_R)
        self._uncopied.clear()

    def wait(self, transfers: Iterable[Transfer]) -> float:
        self.copy()
        return super().wait(transfers)
