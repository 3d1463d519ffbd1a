"""Which slots must keep what they hold: blocks under way, and blocks soon needed.

Every lookup and every transfer asks this: sets and dicts, no arrays.
"""

from collections.abc import Collection, Sequence

from moe_edge.offload.block_queue import Transfer
from moe_edge.offload.evict_base import CacheSpec


class SlotPins:
    """Two reasons to keep a slot.

    Args:
      home_S: the home of each slot, where experts have fixed homes.
    """

    def __init__(self, spec: CacheSpec, home_S: Sequence[int] | None = None):
        self._home_at = None if home_S is None else list(home_S)
        # By slot, transfers that are not yet known to be done.
        self.moving: dict[int, Transfer] = {}
        # By block key, slots of blocks that a coming layer is expected to choose.
        self.expected: dict[int, int] = {}
        self._key_at: dict[int, int] = {}  # `expected` the other way round
        self._layer_at = list(spec.layer_S)
        self._is_pool = all(layer == -1 for layer in spec.layer_S)

    def begin(self, slot: int, transfer: Transfer) -> None:
        """A block is on its way into the slot."""
        self.moving[slot] = transfer

    def end(self, slot: int) -> None:
        """The block has arrived, or never will."""
        self.moving.pop(slot, None)

    def settle(self) -> None:
        """Lets go of what has arrived."""
        for slot in [s for s, transfer in self.moving.items() if transfer.done]:
            del self.moving[slot]

    def underway(self, slot: int) -> Transfer | None:
        """The transfer into the slot, if it has not arrived."""
        transfer = self.moving.get(slot)
        return None if transfer is None or transfer.done else transfer

    def expect(self, key: int, slot: int) -> None:
        """A coming layer is expected to choose the block, which has this slot."""
        if self.expected.get(key) != slot:
            self.forget(key)
            self.give_up(slot)
            self.expected[key] = slot
            self._key_at[slot] = key

    def forget(self, key: int) -> None:
        """The block is chosen, or will not be."""
        slot = self.expected.pop(key, None)
        if slot is not None:
            del self._key_at[slot]

    def forget_all(self) -> None:
        """Nothing is expected any more."""
        self.expected.clear()
        self._key_at.clear()

    def clear(self) -> None:
        """No block is on its way or expected."""
        self.forget_all()
        self.moving.clear()

    def give_up(self, slot: int) -> None:
        """Another block has the slot now."""
        key = self._key_at.get(slot)
        if key is not None:
            self.forget(key)

    def count_expected(self, layer: int, home: int = 0) -> int:
        """How many of a home's slots that the layer may use hold expected blocks."""
        at, home_at = self._layer_at, self._home_at
        if home_at is not None:
            slots = [slot for slot in self._key_at if home_at[slot] == home]
            return sum(at[slot] in (layer, -1) for slot in slots)
        if self._is_pool:
            return len(self._key_at)
        return sum(at[slot] in (layer, -1) for slot in self._key_at)

    def kept(self, busy: Collection[int] = (), *, expected: bool = True) -> set[int]:
        """A new set of the slots that may not be given away.

        Args:
          busy: further ones, that programs in flight read.
          expected: False gives up what is only expected.
        """
        kept = {*self.moving, *busy}
        if expected:
            kept.update(self._key_at)
        return kept
