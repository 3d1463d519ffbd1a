"""Which blocks are in slots, on their way there, or soon needed there.

Joins the cache's table, the queue that brings blocks, and the pins that keep slots. No
prediction and no counting happen here.
"""

import numpy as np

from moe_edge.offload.block_queue import Transfer
from moe_edge.offload.home_queues import Queues
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slot_pins import SlotPins


class Residency:
    """Gives blocks slots (by `cache` and `pins`) and asks `queue` for their bytes."""

    def __init__(self, cache: SlotCache, queue: Queues):
        self.cache, self.queue, self.spec = cache, queue, cache.spec
        homes = cache.homes
        is_fixed = homes is not None and homes.is_fixed
        self.pins = SlotPins(cache.spec, homes.home_S if is_fixed else None)

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

    def take_back(self, layer: int, chosen: set[int]) -> None:
        """Cancels queued prefetches of this layer that it did not choose (by key)."""
        E, pins = self.spec.num_experts, self.pins
        wrong = [k for k in pins.expected if k // E == layer and k not in chosen]
        if not wrong:
            return
        self._cancel(lambda key: key // E != layer or key in chosen)
        for key in wrong:
            pins.forget(key)

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

    def slots(self, layer: int, ids_TK, arrived_only: bool = False) -> np.ndarray:
        """int32 slot of every chosen expert; S where there is none (or none yet)."""
        row, nowhere = self.cache.rows[layer], self.spec.num_slots
        away = self.pins.moving if arrived_only else ()
        slots = [row[expert] for expert in ids_TK.reshape(-1).tolist()]
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
        waited_s = self.queue.wait(moving)
        self.pins.settle()
        return waited_s if moving else 0.0
