"""A worker's few slots behind a link of their own."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.carrier import Transfer
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slots import Slots, make_slots
from moe_edge.offload.store import HostStore


class DatedCarrier(ComputedCarrier):
    """Blocks arrive when the link says so.

    Order and times are those of an emulated link (`offload/computed_carrier.py`), by
    the real clock and without a thread: on a machine that all processes share, a thread
    that wakes up for every block took more time than the copies. Copies are made when
    there is time (`copy`), at the latest when somebody waits for them. All methods
    belong to one thread, which also dispatches what reads the slots.

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


class WorkerSlots:
    """A few slots behind a link; what `Answers` computes from.

    Attributes:
      lock, array, nowhere: as in `Holdings`.
    """

    def __init__(self, store: HostStore, num_slots: int, bytes_per_s: float | None):
        self._slots = make_slots(num_slots, store.record_size, store.dtype)
        self.lock, self.nowhere = threading.RLock(), num_slots
        self.carrier = DatedCarrier(store, self._slots, bytes_per_s)
        self.queue = BlockQueue([self.carrier])
        self._free = list(range(num_slots))
        self._here: dict[tuple[int, int], Transfer] = {}

    @property
    def array(self):
        return self._slots.array

    @property
    def cells(self) -> set[tuple[int, int]]:
        """(layer, block) of all that has a slot."""
        return set(self._here)

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    @property
    def free(self) -> int:
        return len(self._free)

    def load(self, layer: int, block: int, cause: str) -> Transfer:
        """Asks for a block; a slot must be free unless it is there or on its way."""
        transfer = self._here.get((layer, block))
        if transfer is None:
            slot = self._free.pop()
            transfer = self.queue.request(layer, block, slot, cause)
            self._here[layer, block] = transfer
        elif cause == "demand":
            self.queue.promote(transfer)
        return transfer

    def release(self, keep: Collection[tuple[int, int]] = ()) -> None:
        """Frees all slots but those of blocks to keep (layer, block)."""
        gone = [cell for cell in self._here if cell not in keep]
        if not gone:
            return
        self.queue.cancel_prefetches(
            {t.key for cell, t in self._here.items() if cell in keep}
        )
        for cell in gone:
            self._free.append(self._here.pop(cell).slot)

    def slot_E(self, layer: int, num_experts: int) -> np.ndarray:
        """int32 [E]: slots of a layer's blocks that have arrived or will."""
        slot_E = np.full(num_experts, self.nowhere, np.int32)
        for (own, block), transfer in self._here.items():
            if own == layer:
                slot_E[block] = transfer.slot
        return slot_E
