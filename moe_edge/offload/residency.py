"""Which blocks are in slots, on their way there, or soon needed there.

Joins the cache's table, the queue that brings blocks, and the pins that keep slots. No
prediction and no counting happen here. Every lookup and every transfer asks the pins:
sets and dicts, no arrays.
"""

from collections.abc import Collection, Sequence

import numpy as np

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.carrier import Transfer
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.slot_cache import SlotCache


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


class Residency:
    """Gives blocks slots (by `cache` and `pins`) and asks `queue` for their bytes."""

    def __init__(self, cache: SlotCache, queue: BlockQueue):
        self.cache, self.queue, self.spec = cache, queue, cache.spec
        homes = cache.homes
        is_fixed = homes is not None and homes.is_fixed
        self.pins = SlotPins(cache.spec, homes.home_S if is_fixed else None)

    @property
    def is_busy(self) -> bool:
        """Whether a block is on its way or expected."""
        return bool(self.pins.expected or self.pins.moving)

    def demand(self, layer: int, experts, step: int, busy=()) -> list[Transfer]:
        """Asks for experts that are needed now, in order.

        Args:
          busy: slots that programs in flight read.
        Returns:
          transfers, one for each expert that got a slot: those of the head of the list.
        """
        pins, blocks = self.pins, []
        kept = pins.kept(busy)
        for expert in experts:
            slot = self.cache.admit(layer, expert, kept)
            if slot is None and pins.expected:
                # Better to lose a prefetch than not to run.
                kept = pins.kept(busy, expected=False)
                kept.update(slot for *_, slot in blocks)
                slot = self.cache.admit(layer, expert, kept)
            if slot is None:
                break
            pins.give_up(slot)
            kept.add(slot)
            blocks.append((layer, expert, slot))
        return self.ask(blocks, "demand", step)

    def ask(self, blocks, cause: str, step: int) -> list[Transfer]:
        """Asks for the bytes of blocks that have got slots: (layer, expert, slot)."""
        if not blocks:
            return []
        try:
            transfers = self.queue.request_all(blocks, cause, step)
        except BaseException:
            for layer, expert, slot in blocks:  # they never came
                self.cache.drop(layer, expert)
                self.pins.give_up(slot)
            raise
        for transfer in transfers:
            self.pins.begin(transfer.slot, transfer)
        return transfers

    def underway(self, layer: int, experts) -> list[Transfer]:
        """Transfers of those that have a slot and have not arrived there."""
        pins = self.pins
        if not pins.moving:
            return []
        row = self.cache.rows[layer]
        transfers = [pins.underway(row[expert]) for expert in experts]
        return [transfer for transfer in transfers if transfer is not None]

    def arrived(self, layer: int) -> np.ndarray:
        """bool [E]: whose bytes are in their slots. Not those that are on their way:
        to choose one of these means to wait for it."""
        here_E, pins = self.cache.resident(layer), self.pins
        if pins.moving:
            pins.settle()
        if pins.moving:
            here_E &= ~np.isin(self.cache.slot_LE[layer], list(pins.moving))
        return here_E

    def _take_back(self, layer: int, chosen: set[int]) -> None:
        """Cancels queued prefetches of this layer that it did not choose (by key)."""
        E, pins = self.spec.num_experts, self.pins
        wrong = [k for k in pins.expected if k // E == layer and k not in chosen]
        if not wrong:
            return
        self._cancel(lambda key: key // E != layer or key in chosen)
        for key in wrong:
            pins.forget(key)

    def settle_lookup(self, layer: int, hits, misses) -> list[int]:
        """Pins and queue follow a lookup: hits whose blocks are still on their way."""
        base, pins = layer * self.spec.num_experts, self.pins
        chosen = {base + expert for expert in (*hits, *misses)}
        self._take_back(layer, chosen)
        pins.settle()
        for key in chosen:
            pins.forget(key)
        for expert in hits:
            self.queue.used(base + expert)
        return [transfer.expert for transfer in self.underway(layer, hits)]

    def _cancel(self, keep=()) -> None:
        for layer, expert, slot in self.queue.cancel_prefetches(keep):
            self.cache.drop(layer, expert)
            self.pins.end(slot)

    def ready_slots(self, layer: int, ids_TK) -> np.ndarray | None:
        """int32 slots of the chosen experts if all are there already, else None.

        S for id E, which is no expert. None also for policies whose lookup may empty
        slots.
        """
        if self.cache.policy.forgets:
            return None
        row, E, nowhere = (
            self.cache.rows[layer],
            self.spec.num_experts,
            self.spec.num_slots,
        )
        ids = ids_TK.reshape(-1).tolist()
        slots = [row[expert] if expert < E else nowhere for expert in ids]
        if min(slots) < 0:
            return None
        pins = self.pins
        if pins.moving:
            pins.settle()
            if not pins.moving.keys().isdisjoint(slots):
                return None
        return np.array(slots, np.int32).reshape(ids_TK.shape)

    def slots(
        self,
        layer: int,
        ids_TK,
        arrived_only: bool = False,
        leave_out: Collection[int] = (),
    ) -> np.ndarray:
        """int32 slot of every chosen expert; S where there is none (or none yet).

        Args:
          leave_out: experts that get S wherever they are.
        """
        row, nowhere = self.cache.rows[layer], self.spec.num_slots
        away = self.pins.moving if arrived_only else ()
        ids = ids_TK.reshape(-1).tolist()
        slots = [-1 if expert in leave_out else row[expert] for expert in ids]
        slots = [nowhere if s < 0 or s in away else s for s in slots]
        return np.array(slots, np.int32).reshape(ids_TK.shape)

    def drain(self) -> float:
        """Takes back all queued prefetches and waits for the transfer under way.

        Returns:
          the seconds it waited; 0 if nothing was under way.
        """
        self._cancel()
        self.pins.forget_all()
        moving = list(self.pins.moving.values())
        waited_s = self.wait(moving)
        return waited_s if moving else 0.0

    def wait(self, transfers: Sequence[Transfer]) -> float:
        """Returns when these blocks are in their slots: the seconds it took."""
        waited_s = self.queue.wait(transfers)
        self.pins.settle()
        return waited_s

    def recover(self) -> None:
        """Nothing is on its way or expected, after an error."""
        self.queue.recover()
        self.pins.clear()
