"""The manager's decisions by hand, over a queue that moves only when told to."""

import dataclasses
import time

import numpy as np

from moe_edge.core.events import Recorder, Total
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import CacheSpec, get_policy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.transfer import Transfer, TransferStats
from moe_edge.predict.base import Predictor

L, E, K = 3, 6, 2
REST = ("wasted_bytes", "unused_bytes", "cancelled", "wait_s")


class FakeQueue:
    """Notes what it is asked for; `carry` lets the next blocks arrive."""

    def __init__(self):
        self.waiting, self.asked, self.used_keys = [], [], []
        self.totals = {cause: Total() for cause in ("demand", "prefetch")}
        self.cancelled = 0

    def request(self, layer, expert, slot, cause, step=None):
        assert all(transfer.slot != slot for transfer in self.waiting), (
            "slot is awaited"
        )
        transfer = Transfer(layer, expert, slot, layer * E + expert, cause, step, 0.0)
        self.waiting.append(transfer)
        self.asked.append((cause, layer, expert))
        return transfer

    def carry(self, count=100):
        self.waiting.sort(key=lambda transfer: transfer.cause)  # demands first
        for transfer in self.waiting[:count]:
            transfer.state = "done"
            self.totals[transfer.cause].bytes += 1
        del self.waiting[:count]

    def wait(self, transfers):
        waited_s = 0.0
        while not all(transfer.done for transfer in transfers):
            assert any(not transfer.done for transfer in self.waiting), "waits for ever"
            self.carry(1)
            waited_s += 1.0
        return waited_s

    def promote(self, transfer):
        transfer.cause = "demand"

    def used(self, key):
        self.used_keys.append(key)

    def cancel_prefetches(self, keep=lambda key: False):
        gone = [t for t in self.waiting if t.cause == "prefetch" and not keep(t.key)]
        self.waiting = [transfer for transfer in self.waiting if transfer not in gone]
        self.cancelled += len(gone)
        return [(transfer.layer, transfer.expert, transfer.slot) for transfer in gone]

    def reset_stats(self):
        self.totals = {cause: Total() for cause in ("demand", "prefetch")}

    def stats(self):
        totals = {c: dataclasses.replace(t) for c, t in self.totals.items()}
        return TransferStats(**totals, **dict.fromkeys(REST, 0))


@dataclasses.dataclass(frozen=True)
class Scripted(Predictor):
    """Says of each layer's followers what the script says, best first."""

    script: dict = dataclasses.field(default_factory=dict)
    name = "scripted"

    def predict(self, state, layer, horizon):
        rows = self.script.get(layer, [[]])
        ids = np.full((horizon, max(map(len, rows))), -1, np.int32)
        for row, experts in enumerate(rows[:horizon]):
            ids[row, : len(experts)] = experts
        return ids, np.ones(ids.shape, np.float32)


def make(slots=6, script=None, layer_S=None, **options):
    spec = CacheSpec(L, E, K, layer_S or (-1,) * slots)
    predictor = None if script is None else Scripted(script)
    cache = SlotCache(spec, get_policy("lru"))
    return OffloadManager(cache, FakeQueue(), predictor=predictor, **options)


def look_up(manager, layer, *experts, step=0):
    ids_TK = np.array([experts], np.int32)
    hits, misses = manager.look_up(layer, ids_TK, None, step)
    return hits.tolist(), misses.tolist()


def bring(manager, layer, *experts, step=0):
    """A lookup whose misses are waited for."""
    hits, misses = look_up(manager, layer, *experts, step=step)
    transfers = manager.arriving(layer, hits) + manager.fetch(layer, misses, step)
    return manager.wait(transfers, layer, step)


def counts(manager):
    c = manager.counters[True]
    return c.hits, c.misses, c.late, c.wait_s


def held(manager, layer):
    return np.flatnonzero(manager.cache.resident(layer)).tolist()


def test_misses_are_asked_for_in_order_and_hits_are_not():
    manager = make()
    assert look_up(manager, 0, 4, 1) == ([], [4, 1])
    transfers = manager.fetch(0, [4, 1], 0)
    assert manager.wait(transfers, 0, 0) == 2.0
    assert look_up(manager, 0, 1, 5) == ([1], [5])
    assert bring(manager, 0, 1, 5) == 1.0
    assert manager.queue.asked == [("demand", 0, e) for e in (4, 1, 5)]
    assert counts(manager) == (2, 4, 0, 3.0)
    slots_TK = manager.slots_TK(0, np.array([[5, 1], [0, E]], np.int32))
    assert slots_TK.dtype == np.int32
    assert slots_TK.tolist() == [[2, 1], [6, 6]]  # expert 0 is absent, E is padding


def test_a_whole_step_by_hand_golden():
    # Layer 1 gets one right prediction and one wrong one, in four of six slots.
    manager = make(script={0: [[2, 3]]})
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    assert manager.queue.asked[2:] == [("prefetch", 1, 2), ("prefetch", 1, 3)]
    manager.queue.carry()
    assert look_up(manager, 1, 2, 4) == ([2], [4])
    assert E + 2 in manager.queue.used_keys
    assert manager.fetch(1, [4], 0)[0].slot == 4
    assert counts(manager) == (1, 3, 0, 2.0)
    # The wrong one is a cached block like any other now: it may be evicted.
    manager.wait(manager.arriving(1, [4]), 1, 0)
    bring(manager, 2, 0, 1)
    assert held(manager, 0) == [1] and held(manager, 1) == [2, 3, 4]
    bring(manager, 2, 2, 3, step=1)
    assert held(manager, 0) == [] and held(manager, 1) == [2, 4]


def test_late_prefetch_becomes_urgent_and_is_no_hit():
    manager = make(script={0: [[2, 3]]})
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    hits, misses = look_up(manager, 1, 3, 5)
    assert (hits, misses) == ([3], [5])
    assert manager.queue.cancelled == 1 and held(manager, 1) == [3]  # 2 was wrong
    transfers = manager.arriving(1, hits) + manager.fetch(1, misses, 0)
    assert [transfer.cause for transfer in transfers] == ["demand", "demand"]
    late = manager.slots_TK(1, np.array([[3]]), arrived_only=True)
    assert late.tolist() == [[6]]
    manager.wait(transfers, 1, 0)
    assert manager.slots_TK(1, np.array([[3]]), arrived_only=True) != 6
    assert counts(manager) == (0, 4, 1, 4.0)


def test_copied_block_that_the_link_has_not_delivered_is_late():
    manager = make(script={0: [[2, 3]]})
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    for transfer in manager.queue.waiting:
        transfer.arrival_s = time.perf_counter() + 1000.0
    manager.queue.carry()
    hits, misses = look_up(manager, 1, 2, 3)
    ids_TK = np.array([[2, 3]], np.int32)
    assert (hits, misses) == ([2, 3], []) and manager.late.tolist() == [2, 3]
    assert manager.ready_slots(1, ids_TK) is None
    assert manager.slots_TK(1, ids_TK, arrived_only=True).tolist() == [[6, 6]]
    transfers = manager.arriving(1, hits)
    assert [transfer.expert for transfer in transfers] == [2, 3]
    for transfer in transfers:
        transfer.arrival_s = 0.0
    slots = manager.slots_TK(1, ids_TK).tolist()
    assert manager.ready_slots(1, ids_TK).tolist() == slots and max(slots[0]) < 6


def test_stale_prefetch_under_way_is_finished_and_one_of_another_layer_stays():
    manager = make(script={0: [[2], [4]]}, horizon=2)
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    running, queued = manager.queue.waiting
    running.state = "running"
    manager.queue.waiting.remove(running)
    look_up(manager, 1, 0, 1)
    assert manager.queue.waiting == [queued] and manager.queue.cancelled == 0
    # Its slot is still being written: no victim until it has arrived.
    taken = [transfer.slot for transfer in manager.fetch(1, [0, 1], 0)]
    assert running.slot not in taken and queued.slot not in taken


def test_expected_blocks_are_kept_until_their_layer_ran():
    manager = make(slots=4, script={0: [[2]]})
    bring(manager, 1, 2, 3)
    bring(manager, 0, 0, 1, step=1)
    manager.prefetch(0, 1)  # there already: kept, though least recent
    assert len(manager.queue.asked) == 4
    bring(manager, 2, 5, step=1)
    assert held(manager, 1) == [2]
    # Its layer runs without it: an ordinary block again.
    bring(manager, 1, 4, step=2)
    assert held(manager, 1) == [4]


def test_demand_takes_an_expected_slot_before_it_fails():
    manager = make(slots=4, script={0: [[2, 3]]})
    bring(manager, 1, 2, 3)
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    hits, misses = look_up(manager, 2, 0, 1)
    assert len(manager.fetch(2, misses, 0)) == 2 and held(manager, 1) == [2, 3]
    look_up(manager, 2, 0, 1, step=1)
    look_up(manager, 0, 2, 3, step=1)
    assert len(manager.fetch(0, [2, 3, 4, 5], 1)) == 2  # the running lookup's stay
    manager.queue.carry()
    look_up(manager, 0, 2, 3, step=2)
    assert len(manager.fetch(0, [4, 5], 2)) == 2 and held(manager, 0) == [2, 3, 4, 5]


def test_prefetch_leaves_half_of_the_room():
    script = {0: [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]}
    manager = make(slots=8, script=script, horizon=2)
    manager.prefetch(0, 0)
    assert manager.queue.asked == [("prefetch", 1, e) for e in range(4)]
    manager.prefetch(0, 0)  # they are expected already
    assert len(manager.queue.asked) == 4


def test_prefetch_keeps_to_its_limit_and_to_the_room_of_each_layer():
    layer_S = (1,) * 6 + (2,) * 2
    script = {0: [[5, 4], [5, 4]]}
    manager = make(layer_S=layer_S, script=script, horizon=2)
    assert [manager.room(layer) for layer in range(L)] == [0, 6, 2]
    manager.prefetch(0, 0)
    assert manager.queue.asked == [
        *[("prefetch", 1, 5), ("prefetch", 1, 4)],
        ("prefetch", 2, 5),
    ]
    manager = make(layer_S=layer_S, script=script, horizon=2, prefetch_limit=1)
    manager.prefetch(0, 0)
    assert manager.queue.asked == [("prefetch", 1, 5)]


def test_prefetch_passes_over_a_layer_without_room():
    layer_S = (1,) * 2 + (2,) * 4
    manager = make(layer_S=layer_S, script={0: [[5, 4], [5, 4]]}, horizon=2)
    manager.prefetch(0, 0)
    assert manager.queue.asked == [
        *[("prefetch", 1, 5), ("prefetch", 2, 5)],
        ("prefetch", 2, 4),
    ]


def test_prefetch_wraps_to_the_next_token():
    manager = make(script={2: [[3]]})
    manager.prefetch(2, 0)
    assert manager.queue.asked == [("prefetch", 0, 3)]


def test_block_prefetched_too_early_is_used_all_the_same():
    manager = make(script={0: [[2]]})
    manager.prefetch(0, 0)
    manager.queue.carry()
    look_up(manager, 1, 4)
    look_up(manager, 1, 2, step=1)
    assert E + 2 in manager.queue.used_keys


def test_fetch_stops_at_the_first_that_finds_no_slot():
    manager = make(slots=2)
    bring(manager, 0, 0, 1)
    assert len(manager.fetch(0, [2, 3], 0)) == 0  # both are the running lookup's
    manager.cache.release()
    busy = manager.cache.slot_LE[0, [0]].tolist()
    (transfer,) = manager.fetch(0, [2, 3], 0, busy)
    assert held(manager, 0) == [0, 2] and transfer.expert == 2


def test_calm_leaves_nothing_on_its_way():
    manager = make(script={0: [[2, 3]]})
    look_up(manager, 0, 0, 1)
    transfers = manager.fetch(0, [0, 1], 0)
    manager.prefetch(0, 0)
    manager.drain()
    assert all(transfer.done for transfer in transfers)
    assert manager.queue.waiting == [] and manager.queue.cancelled == 2
    assert held(manager, 0) == [0, 1] and held(manager, 1) == []
    assert look_up(manager, 1, 2, 3) == ([], [2, 3])


def test_new_sequence_keeps_blocks_and_forgets_the_rest():
    manager = make(script={0: [[2, 3]]})
    bring(manager, 0, 0, 1)
    manager.prefetch(0, 0)
    manager.finish_sequence()
    assert held(manager, 0) == [0, 1] and held(manager, 1) == []
    assert look_up(manager, 0, 0, 1) == ([0, 1], [])


def test_counters_begin_again_and_movement_follows():
    manager = make()
    assert manager.movement() == {"hit_ratio": None, "bytes_moved": 0}
    bring(manager, 0, 0, 1)
    bring(manager, 0, 0, 2)
    assert manager.movement() == {"hit_ratio": 0.25, "bytes_moved": 3}
    manager.reset_counters()
    assert manager.movement() == {"hit_ratio": None, "bytes_moved": 0}
    bring(manager, 0, 0, 2)
    assert manager.movement() == {"hit_ratio": 1.0, "bytes_moved": 0}


def test_prefill_is_counted_apart():
    manager = make()
    manager.look_up(0, np.array([[0, 1]]), None, 0, is_decode=False)
    assert counts(manager) == (0, 0, 0, 0)
    assert manager.counters[False].misses == 2


def test_predictions_are_scored():
    manager = make(script={0: [[2, 3]]})
    manager.prefetch(0, 0)
    manager.predictor_run.observe(1, np.array([[2, 4]]), None)
    assert manager.predictor_run.accuracy.recall_LA[1].tolist() == [0.5]
    assert manager.predictor_run.accuracy.precision_LA[1].tolist() == [0.5]


def test_events_tell_hits_misses_and_waits():
    manager = make(recorder=Recorder())
    bring(manager, 0, 0, 1)
    bring(manager, 0, 0, 2, step=1)
    events = [(e.kind, e.expert, e.step) for e in manager.recorder.events()]
    assert events == [
        *[("miss", 0, 0), ("miss", 1, 0), ("wait", None, 0)],
        *[("hit", 0, 1), ("miss", 2, 1), ("wait", None, 1)],
    ]
