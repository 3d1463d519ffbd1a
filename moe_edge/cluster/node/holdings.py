"""The blocks that a server holds: slots, which block is in which, and how one arrives.

Blocks come from the checkpoint or from another server. Slots are never more than the
budget. A block serves calls from its arrival on; its slot is free again once the
scheduler says that nobody asks for it any more.
"""

import threading
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from moe_edge.core.checks import CapacityError
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes
from moe_edge.offload.slots import make_slots
from moe_edge.offload.store import device_dtype


class BlockReader:
    """Single records of a checkpoint, read when they are asked for.

    Attributes:
      dtype: of records, as programs take them.
      record_size, block_bytes: of a record.
    """

    def __init__(self, reader):
        """Args: reader: an open checkpoint (`convert.open.open_checkpoint`)."""
        self._reader, self._lock = reader, threading.Lock()
        self.dtype = device_dtype(reader.dtype)
        self.record_size = reader.layout.size
        self.block_bytes = reader.layout.num_bytes(self.dtype)

    def read(self, layer: int, block: int) -> np.ndarray:
        """A new array [R]."""
        record_1R = np.empty((1, self.record_size), self.dtype)
        same_bits = self.dtype.itemsize == self._reader.dtype.itemsize
        target = record_1R.view(self._reader.dtype) if same_bits else record_1R
        with self._lock:  # readers seek in their files
            self._reader.read_experts(layer, block, target)
            self._reader.release()
        return record_1R[0]


class Holdings:
    """Slots of one server and what is in them; any thread may ask.

    Args:
      devices: several: blocks are spread over them.

    Attributes:
      homes: of the slots, on several devices; None: on one.
      slot_LE: int32, the slot of each block; `num_slots` if it is not here. Replaced,
        not changed, so that whoever took it may go on reading.
      most_used: the most slots that were ever taken.
    """

    def __init__(
        self,
        num_slots: int,
        shape_LE: tuple[int, int],
        blocks: BlockReader,
        devices: Sequence[jax.Device] = (),
    ):
        # A server without room for blocks has one slot that stays empty.
        size = max(num_slots, 1)
        self.num_slots, self.blocks, self.homes = num_slots, blocks, None
        shape, free = (blocks.record_size, blocks.dtype), range(num_slots)
        if len(devices) > 1:
            N = len(devices)
            counts = [max(1, -(-(size - home) // N)) for home in range(N)]
            self.homes, size = Homes(None, tuple(counts)), sum(counts)
            parts = zip(counts, devices, strict=True)
            parts = [
                make_slots(count, *shape, device=device) for count, device in parts
            ]
            self._slots = HomeSlots(parts, devices)
            # In turn, so that blocks that come together part.
            place_S = np.concatenate([np.arange(count) for count in counts])
            free = np.argsort(place_S, kind="stable")[:num_slots].tolist()
        else:
            self._slots = make_slots(size, *shape)
        self._nowhere = size
        # Programs take the array under this lock where a write makes a new array.
        self.lock = threading.RLock()
        self.slot_LE = np.full(shape_LE, size, np.int32)
        self._free = list(free)[::-1]
        self.most_used = 0

    @property
    def nowhere(self) -> int:
        """The number of a slot that does not exist: for blocks that are not here."""
        return self._nowhere

    @property
    def array(self) -> jax.Array | tuple[jax.Array, ...]:
        """The records [S, R], of every home; take it, and dispatch with it, under
        `lock`."""
        return self._slots.array

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held_LE(self) -> np.ndarray:
        """bool [L, E]"""
        return self.slot_LE != self._nowhere

    def fill(self, held_LE: np.ndarray) -> None:
        """Holds these blocks, read from the checkpoint, and no others.

        Raises:
          CapacityError: more than there are slots.
        """
        count = int(held_LE.sum())
        if count > self.num_slots:
            raise CapacityError(
                f"{count} blocks for {self.num_slots} slots; place fewer on this server"
            )
        self.drop(np.argwhere(self.held_LE & ~held_LE).tolist())
        for layer, block in np.argwhere(held_LE & ~self.held_LE).tolist():
            self.put(layer, block, self.blocks.read(layer, block))

    def put(self, layer: int, block: int, record_R: np.ndarray) -> None:
        """Writes a block into a free slot, from where it serves; nothing if it is here.

        Raises:
          CapacityError: no slot is free.
        """
        with self.lock:
            if self.slot_LE[layer, block] != self._nowhere:
                return
            if not self._free:
                raise CapacityError(
                    f"block {block} of layer {layer} finds all {self.num_slots} slots "
                    "taken; drop one first"
                )
            slot = self._free.pop()
            self.most_used = max(self.most_used, self.num_slots - len(self._free))
        self._write(slot, record_R)
        self._set([(layer, block)], slot)

    def _write(self, slot: int, record_R: np.ndarray) -> None:
        slots = self._slots_of(slot)
        if slots.safe_in_thread:
            slots.write(slot, record_R)
        else:  # the copy to the device keeps nobody waiting
            staged = slots.stage([record_R])
            with self.lock:
                slots.commit([slot], staged)

    def _slots_of(self, slot: int):
        if self.homes is None:
            return self._slots
        return self._slots.part(int(self.homes.home_S[slot]))

    def lend(self, record_R: np.ndarray) -> int | None:
        """Writes a record into a free slot that no table shows; None: none is free."""
        with self.lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self.most_used = max(self.most_used, self.num_slots - len(self._free))
        self._write(slot, record_R)
        return slot

    def give_back(self, slot: int) -> None:
        """A lent slot is free again."""
        with self.lock:
            self._free.append(slot)

    def drop(self, cells: Iterable[tuple[int, int]]) -> None:
        """Frees the slots of blocks (layer, block) that nobody asks for any more."""
        with self.lock:
            once = dict.fromkeys(map(tuple, cells))
            gone = [c for c in once if self.slot_LE[c] != self._nowhere]
            slots = [int(self.slot_LE[cell]) for cell in gone]
            self._set(gone, self._nowhere)
            self._free += slots

    def _set(self, cells, slot: int) -> None:
        with self.lock:
            slot_LE = self.slot_LE.copy()
            for cell in cells:
                slot_LE[cell] = slot
            self.slot_LE = slot_LE

    def record(self, layer: int, block: int) -> np.ndarray | None:
        """A copy [R] of a block that is here, for another server; else None."""
        with self.lock:
            slot = int(self.slot_LE[layer, block])
            if slot == self._nowhere:
                return None
            return self._slots_of(slot).read(slot)
