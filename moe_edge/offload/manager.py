"""The offload manager: brings a layer's experts into slots, and later layers' ahead.

It joins the cache's bookkeeping, the queue and the predictor_run, and keeps what each
lookup cost. The engine says what a layer chose and dispatches programs; the manager
says in which slots the experts stand. It touches no model code.

Order of the deeds at a layer, which the simulator's replay repeats: refresh the hits,
take back queued prefetches that proved wrong, ask for the misses (best first), ask
for what the predictor names, wait for the misses. Where all is there already the engine
dispatches first and asks for the prefetches meanwhile.
"""

import dataclasses

import numpy as np

from moe_edge.core.events import Recorder
from moe_edge.offload.counters import Counters
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slot_pins import SlotPins
from moe_edge.offload.transfer import Transfer
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun


class OffloadManager:
    """Keeps a layer's experts where programs can read them.

    Args:
      cache: which block is in which slot.
      queue: moves bytes.
      predictor: names later experts; None prefetches nothing.
      horizon: layers ahead that are prefetched.
      prefetch_limit: most prefetches asked for after one lookup.
      recorder: of events.
    """

    def __init__(
        self,
        cache: SlotCache,
        queue: TransferQueue,
        *,
        predictor: Predictor | None = None,
        horizon: int = 1,
        prefetch_limit: int = 8,
        recorder: Recorder | None = None,
    ):
        spec = cache.spec
        self.cache, self.queue, self.spec = cache, queue, spec
        self.predictor_run = PredictorRun(predictor or Predictor(), spec, horizon)
        self.prefetch_limit = prefetch_limit
        self.recorder = recorder or Recorder(enabled=False)
        # Whether a lookup has more to do than to count.
        self._is_watching = self.recorder.enabled or not self.predictor_run.is_idle
        self.reset_counters()
        self._room_L = [
            int(cache.slots_of(layer).sum()) for layer in range(spec.num_layers)
        ]
        self._pins = SlotPins(spec)
        self.late = np.zeros(0, np.int32)  # hits of the last lookup not yet arrived
        self.demanded = 0  # blocks asked for on demand so far

    def reset_counters(self) -> None:
        """Counts from here on, as after a warm-up; blocks and policies stay."""
        self.counters = {True: Counters(), False: Counters()}  # by is_decode
        self.predictor_run.reset_accuracy()
        self.queue.reset_stats()

    def movement(self) -> dict:
        """`hit_ratio` of decoding and `bytes_moved`, since the counters were reset."""
        stats = self.queue.stats()
        moved = stats.demand.bytes + stats.prefetch.bytes
        return {"hit_ratio": self.counters[True].hit_ratio, "bytes_moved": moved}

    def report(self) -> dict:
        """Everything counted since the counters were reset, ready for JSON."""
        phases = {"decode": self.counters[True], "prefill": self.counters[False]}
        return {
            "slots": self.spec.num_slots,
            "block_bytes": self.queue.store.block_bytes,
            "eviction": self.cache.policy.name,
            "predictor": self.predictor_run.predictor.name,
            "link": self.queue.link.describe(),
            **{name: dataclasses.asdict(c) for name, c in phases.items()},
            **self.movement(),
            "transfers": dataclasses.asdict(self.queue.stats()),
            "prediction": self.predictor_run.accuracy.summary(),
        }

    def room(self, layer: int) -> int:
        """Slots that may hold blocks of this layer."""
        return self._room_L[layer]

    # One lookup.

    def look_up(self, layer, ids_TK, scores_TE, step, is_decode=True):
        """Refreshes a layer's chosen experts.

        Returns:
          (hits, misses): distinct experts; a hit may still be on its way.
        """
        found = self.cache.look_up(layer, ids_TK, scores_TE, step)
        counters, pins = self.counters[is_decode], self._pins
        if not (pins.expected or pins.moving or self._is_watching):
            self.late = found.hits[:0]
            counters.hits += len(found.hits)
            counters.misses += len(found.misses)
            return found.hits, found.misses
        base, hits = layer * self.spec.num_experts, found.hits.tolist()
        chosen = {base + expert for expert in (*hits, *found.misses.tolist())}
        self._take_back(layer, chosen)
        pins.settle()
        for key in chosen:
            pins.forget(key)
        for expert in hits:
            self.queue.used(base + expert)
        self.late = found.hits[:0]
        if pins.moving:
            row = self.cache.rows[layer]
            moving = [pins.underway(row[expert]) is not None for expert in hits]
            self.late = found.hits[np.array(moving, bool)]
        late = len(self.late)
        counters.hits += len(hits) - late
        counters.misses += len(found.misses) + late
        counters.late += late
        if self.recorder.enabled:
            self._record_lookup(layer, found, step)
        return found.hits, found.misses

    def _record_lookup(self, layer: int, found, step: int) -> None:
        now_s = self.recorder.clock.now()
        here, absent = np.setdiff1d(found.hits, self.late), (*self.late, *found.misses)
        for kind, experts in (("hit", here), ("miss", np.array(absent, np.int32))):
            for expert in experts.tolist():
                self.recorder.add(kind, now_s, layer=layer, expert=expert, step=step)

    def _take_back(self, layer: int, chosen: set[int]) -> None:
        """Cancels queued prefetches of this layer that it did not choose."""
        E, pins = self.spec.num_experts, self._pins
        wrong = [k for k in pins.expected if k // E == layer and k not in chosen]
        if not wrong:
            return
        for _, expert, slot in self.queue.cancel_prefetches(
            lambda key: key // E != layer or key in chosen
        ):
            self.cache.drop(layer, expert)
            pins.end(slot)
        for key in wrong:
            pins.forget(key)

    def fetch(self, layer: int, experts, step: int, busy=()) -> list[Transfer]:
        """Asks for experts that are needed now, in order.

        Args:
          busy: slots that programs in flight read.
        Returns:
          transfers, one for each expert that got a slot: those of the head of the list.
        """
        transfers = []
        for expert in np.asarray(experts, np.int32).tolist():
            transfer = self._admit(layer, expert, step, "demand", busy)
            if transfer is None:
                break
            transfers.append(transfer)
        return transfers

    def _admit(self, layer, expert, step, cause, busy=()) -> Transfer | None:
        pins = self._pins
        slot = self.cache.admit(layer, expert, pins.protected(busy))
        if slot is None and cause == "demand" and pins.expected:
            # Better to lose a prefetch than not to run.
            protected_S = pins.protected(busy, expected=False)
            slot = self.cache.admit(layer, expert, protected_S)
        if slot is None:
            return None
        pins.give_up(slot)
        try:
            transfer = self.queue.request(layer, expert, slot, cause, step)
        except BaseException:
            self.cache.drop(layer, expert)  # it never came
            raise
        self.demanded += cause == "demand"
        pins.begin(slot, transfer)
        return transfer

    def arriving(self, layer: int, hits) -> list[Transfer]:
        """Tickets of hits that are still on their way, now as urgent as misses."""
        if not self._pins.moving:
            return []
        row = self.cache.rows[layer]
        transfers = [self._pins.underway(row[expert]) for expert in np.asarray(hits)]
        transfers = [transfer for transfer in transfers if transfer is not None]
        for transfer in transfers:
            self.queue.promote(transfer)
        return transfers

    def wait(self, transfers, layer: int, step: int, is_decode: bool = True) -> float:
        """Returns when the blocks are in their slots: seconds waited."""
        if not transfers:
            return 0.0
        start_s = self.recorder.clock.now() if self.recorder.enabled else 0.0
        waited_s = self.queue.wait(transfers)
        self._pins.settle()
        self.counters[is_decode].wait_s += waited_s
        if self.recorder.enabled:
            self.recorder.add("wait", start_s, waited_s, layer=layer, step=step)
        return waited_s

    def ready_slots(self, layer: int, ids_TK) -> np.ndarray | None:
        """int32 slots of the chosen experts if all are there already, else None.

        Also None for padding rows and for policies whose lookup may empty slots.
        """
        if self.cache.policy.forgets:
            return None
        row = self.cache.rows[layer]
        slots = [row[expert] for expert in ids_TK.reshape(-1).tolist()]
        if min(slots) < 0:
            return None
        pins = self._pins
        if pins.moving:
            pins.settle()
            if not pins.moving.keys().isdisjoint(slots):
                return None
        return np.array(slots, np.int32).reshape(ids_TK.shape)

    def slots_TK(self, layer: int, ids_TK, arrived_only: bool = False) -> np.ndarray:
        """int32 slot of every chosen expert; S where there is none (or none yet)."""
        slot_TK = self.cache.slots(layer, ids_TK)
        absent_TK = slot_TK < 0
        if arrived_only and self._pins.moving:
            absent_TK |= np.isin(slot_TK, list(self._pins.moving))
        slot_TK[absent_TK] = self.spec.num_slots
        return slot_TK

    # Ahead of need.

    def prefetch(self, layer: int, step: int) -> None:
        """Asks for what the predictor expects of the next layers, nearest first."""
        if self.predictor_run.is_idle:
            return
        ids_NM = self.predictor_run.predict(layer)
        if not ids_NM.size:
            return
        E, L, pins = self.spec.num_experts, self.spec.num_layers, self._pins
        left = self.prefetch_limit
        for ahead, ids in enumerate(ids_NM.tolist()):
            target = (layer + 1 + ahead) % L
            # Half of the room at most: the layer's own misses need the rest.
            spare = self._room_L[target] // 2 - pins.count_expected(target)
            row = self.cache.rows[target]
            for expert in ids:
                if left <= 0:
                    return
                if spare <= 0:
                    break
                if expert < 0:
                    continue
                slot = row[expert]
                if slot < 0:
                    transfer = self._admit(target, expert, step, "prefetch")
                    if transfer is None:
                        break
                    slot, left, spare = transfer.slot, left - 1, spare - 1
                # One that is here already stays until its layer has run.
                pins.expect(target * E + expert, slot)

    def drain(self) -> None:
        """Takes back all queued prefetches and waits for the transfer under way."""
        for layer, expert, slot in self.queue.cancel_prefetches():
            self.cache.drop(layer, expert)
            self._pins.end(slot)
        self._pins.forget_all()
        self.queue.wait(list(self._pins.moving.values()))
        self._pins.settle()

    def new_sequence(self) -> None:
        """The records of the sequence go; blocks stay, and transfers go on."""
        self.predictor_run.finish_sequence()
        self.cache.new_sequence()

    def finish_sequence(self) -> None:
        """A new session begins: `drain`, then `new_sequence`."""
        self.drain()
        self.new_sequence()

    def empty(self) -> None:
        """Takes every block out of its slot; the policy begins anew."""
        self.drain()
        for layer, expert in np.argwhere(self.cache.slot_LE >= 0).tolist():
            self.cache.drop(layer, expert)
        self.cache.new_sequence()

    def restart(self) -> None:
        """As new: every slot empty, policy and predictor without a record."""
        self.drain()
        self.cache.restart()
        self.predictor_run.restart()
        self.reset_counters()
