"""A worker's few slots behind a link of their own."""

import threading
from collections.abc import Collection

import numpy as np

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.carrier import Transfer
from moe_edge.offload.slots import make_slots
from moe_edge.offload.store import HostStore
from moe_edge.papers.od_moe.cluster.dated_carrier import DatedCarrier


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
