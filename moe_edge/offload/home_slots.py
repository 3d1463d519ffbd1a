"""The slots of several homes under common numbers; see `homes`."""

from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.offload.slots import DonatedSlots, Slots


class HomeSlots:
    """The slots of all homes, which each home's carrier writes through its `part`.

    Args:
      parts: of each home, on its device.
    """

    def __init__(self, parts: Sequence[Slots], devices: Sequence[jax.Device]):
        self._parts, self.devices = tuple(parts), tuple(devices)
        self.num_slots = sum(part.num_slots for part in parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.safe_in_thread = all(part.safe_in_thread for part in parts)

    @property
    def array(self) -> tuple[jax.Array, ...]:
        """`[S, R]` of every home, on its device."""
        return tuple(part.array for part in self._parts)

    @property
    def dtype(self) -> np.dtype:
        return self._parts[0].dtype

    def part(self, home: int) -> "HomePart":
        """A home's slots under the numbers that all homes share."""
        first = sum(part.num_slots for part in self._parts[:home])
        return HomePart(self._parts[home], first)


class HomePart:
    """The slots of one home as its carrier sees them: numbered among those of all."""

    def __init__(self, slots: Slots, first: int):
        self._slots, self._first = slots, first
        self.num_slots = first + slots.num_slots
        self.safe_in_thread, self.max_staged = slots.safe_in_thread, slots.max_staged
        self.gathers = isinstance(slots, DonatedSlots) and slots.gathers

    def write(self, slot: int, source_R) -> None:
        self._slots.write(slot - self._first, source_R)

    def row(self, slot: int) -> np.ndarray:
        return self._slots.row(slot - self._first)

    def stage(self, sources) -> list[jax.Array]:
        return self._slots.stage(sources)

    def commit(self, slots: Sequence[int], staged: Sequence[jax.Array]) -> None:
        self._slots.commit([slot - self._first for slot in slots], staged)

    def read(self, slot: int) -> np.ndarray:
        return self._slots.read(slot - self._first)

    def recover(self) -> None:
        self._slots.recover()
