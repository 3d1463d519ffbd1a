"""The layer_step's decisions by hand, over a queue that moves only when told to."""

import dataclasses
import time

import numpy as np

from moe_edge.core.events import Recorder
from moe_edge.engine.layer_report import LayerReport
from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.carrier import Carrier
from moe_edge.offload.computed_visit import pass_layer
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.link import TransferLink
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.predict.base import Predictor

L, E, K = 3, 6, 2


class FakeCarrier(Carrier):
    """`carry` lets the next blocks arrive."""

    def __init__(self):
        super().__init__(TransferLink(), 1, E, time.perf_counter)

    @property
    def waiting(self):
        return [transfer for queue in self._waiting.values() for transfer in queue]

    def carry(self, count=100):
        for _ in range(min(count, len(self.waiting))):
            transfer = self._next().popleft()
            dated_s = transfer.arrival_s
            self._carried([transfer], 0.0, 0.0)
            transfer.state, transfer.arrival_s = "done", dated_s

    def wait(self, transfers):
        waited_s = 0.0
        while not all(transfer.done for transfer in transfers):
            assert self.waiting, "waits for ever"
            self.carry(1)
            waited_s += 1.0
        return waited_s

    def poll(self):
        pass


class FakeQueue(BlockQueue):
    """Notes what it is asked for."""

    def __init__(self):
        super().__init__([FakeCarrier()])
        self.asked, self.used_keys = [], []
        self.carry = self.carriers[0].carry

    @property
    def waiting(self):
        return self.carriers[0].waiting

    @property
    def cancelled(self):
        return self.stats().cancelled

    def request_all(self, blocks, cause, step=None):
        self.asked += [(cause, layer, expert) for layer, expert, _ in blocks]
        return super().request_all(blocks, cause, step)

    def used(self, key):
        self.used_keys.append(key)
        super().used(key)


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
    cache = SlotCache(spec, get_eviction("lru"))
    return LayerStep(cache, FakeQueue(), predictor=predictor, **options)


def look_up(layer_step, layer, *experts, step=0):
    return layer_step.look_up(layer, np.array([experts], np.int32), None, step)


def found(visit):
    return visit.hits, visit.late, visit.misses


def bring(layer_step, layer, *experts, step=0):
    """A whole visit without prefetching."""
    visit = look_up(layer_step, layer, *experts, step=step)
    visit.may_prefetch = False
    layer_step.bring(visit)
    layer_step.finish(visit)
    return visit


def prefetch(layer_step, layer, step=0):
    layer_step.prefetcher.prefetch(layer, step)


def counts(layer_step):
    c = layer_step.counters[True]
    return c.hits, c.misses, c.late, c.wait_s


def held(layer_step, layer):
    return np.flatnonzero(layer_step.cache.resident(layer)).tolist()


def test_misses_are_asked_for_in_order_and_hits_are_not():
    layer_step = make()
    first = bring(layer_step, 0, 4, 1)
    assert (first.misses, first.missed, first.waited_s) == ([4, 1], [4, 1], 2.0)
    second = bring(layer_step, 0, 1, 5)
    assert (second.hits, second.misses, second.waited_s) == ([1], [5], 1.0)
    assert layer_step.queue.asked == [("demand", 0, e) for e in (4, 1, 5)]
    assert counts(layer_step) == (1, 3, 0, 3.0)
    slots_TK = layer_step.residency.slots(0, np.array([[5, 1], [0, E]], np.int32))
    assert slots_TK.dtype == np.int32
    assert slots_TK.tolist() == [[2, 1], [6, 6]]  # expert 0 is absent, E is padding


def test_a_whole_step_by_hand_golden():
    # Layer 1 gets one right prediction and one wrong one, in four of six slots.
    layer_step = make(script={0: [[2, 3]]})
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    assert layer_step.queue.asked[2:] == [("prefetch", 1, 2), ("prefetch", 1, 3)]
    layer_step.queue.carry()
    visit = bring(layer_step, 1, 2, 4)
    assert found(visit) == ([2], [], [4]) and visit.transfers[0].slot == 4
    assert E + 2 in layer_step.queue.used_keys
    assert counts(layer_step) == (1, 3, 0, 3.0)
    # The wrong one is a cached block like any other now: it may be evicted.
    bring(layer_step, 2, 0, 1)
    assert held(layer_step, 0) == [1] and held(layer_step, 1) == [2, 3, 4]
    bring(layer_step, 2, 2, 3, step=1)
    assert held(layer_step, 0) == [] and held(layer_step, 1) == [2, 4]


def test_late_prefetch_becomes_urgent_and_is_no_hit():
    layer_step = make(script={0: [[2, 3]]})
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    visit = look_up(layer_step, 1, 3, 5)
    assert found(visit) == ([], [3], [5])
    assert layer_step.queue.cancelled == 1 and held(layer_step, 1) == [3]  # 2 was wrong
    late = layer_step.residency.slots(1, np.array([[3]]), arrived_only=True)
    assert late.tolist() == [[6]]
    layer_step.bring(visit)
    layer_step.finish(visit)
    assert [(t.expert, t.cause) for t in visit.transfers] == [
        (3, "demand"),
        (5, "demand"),
    ]
    assert layer_step.residency.slots(1, np.array([[3]]), arrived_only=True) != 6
    assert counts(layer_step) == (0, 4, 1, 4.0)


def test_blocks_on_their_way_have_not_arrived():
    layer_step = make(script={0: [[2, 3]]})
    bring(layer_step, 0, 0, 1)
    assert np.flatnonzero(layer_step.residency.arrived(0)).tolist() == [0, 1]
    prefetch(layer_step, 0, 0)
    assert held(layer_step, 1) == [2, 3]  # they have their slots
    assert not layer_step.residency.arrived(1).any()
    layer_step.queue.carry(1)
    assert layer_step.residency.arrived(1).sum() == 1
    layer_step.queue.carry()
    assert np.flatnonzero(layer_step.residency.arrived(1)).tolist() == [2, 3]


def test_copied_block_that_the_link_has_not_delivered_is_late():
    layer_step = make(script={0: [[2, 3]]})
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    for transfer in layer_step.queue.waiting:
        transfer.arrival_s = time.perf_counter() + 1000.0
    layer_step.queue.carry()
    visit = look_up(layer_step, 1, 2, 3)
    ids_TK = np.array([[2, 3]], np.int32)
    assert found(visit) == ([], [2, 3], [])
    assert layer_step.residency.ready_slots(1, ids_TK) is None
    assert layer_step.residency.slots(1, ids_TK, arrived_only=True).tolist() == [[6, 6]]
    transfers = layer_step.residency.underway(1, visit.late)
    assert [transfer.expert for transfer in transfers] == [2, 3]
    for transfer in transfers:
        transfer.arrival_s = 0.0
    slots = layer_step.residency.slots(1, ids_TK).tolist()
    assert (
        layer_step.residency.ready_slots(1, ids_TK).tolist() == slots
        and max(slots[0]) < 6
    )
    padded_TK = np.array([[2, 3], [3, layer_step.spec.num_experts]], np.int32)
    nowhere = layer_step.spec.num_slots
    ready_TK = layer_step.residency.ready_slots(1, padded_TK)
    assert ready_TK.tolist() == [slots[0], [slots[0][1], nowhere]]


def test_stale_prefetch_under_way_is_finished_and_one_of_another_layer_stays():
    layer_step = make(script={0: [[2], [4]]}, horizon=2)
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    running, queued = layer_step.queue.waiting
    running.state = "running"
    layer_step.queue.carriers[0]._waiting["prefetch"].remove(running)
    visit = look_up(layer_step, 1, 0, 1)
    assert layer_step.queue.waiting == [queued] and layer_step.queue.cancelled == 0
    # Its slot is still being written: no victim until it has arrived.
    taken = [transfer.slot for transfer in layer_step.demand(visit, [0, 1])]
    assert running.slot not in taken and queued.slot not in taken


def test_expected_blocks_are_kept_until_their_layer_ran():
    layer_step = make(slots=4, script={0: [[2]]})
    bring(layer_step, 1, 2, 3)
    bring(layer_step, 0, 0, 1, step=1)
    prefetch(layer_step, 0, 1)  # there already: kept, though least recent
    assert len(layer_step.queue.asked) == 4
    bring(layer_step, 2, 5, step=1)
    assert held(layer_step, 1) == [2]
    # Its layer runs without it: an ordinary block again.
    bring(layer_step, 1, 4, step=2)
    assert held(layer_step, 1) == [4]


def test_demand_takes_an_expected_slot_before_it_fails():
    layer_step = make(slots=4, script={0: [[2, 3]]})
    bring(layer_step, 1, 2, 3)
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    visit = look_up(layer_step, 2, 0, 1)
    assert len(layer_step.demand(visit, visit.misses)) == 2 and held(layer_step, 1) == [
        2,
        3,
    ]
    look_up(layer_step, 2, 0, 1, step=1)
    visit = look_up(layer_step, 0, 2, 3, step=1)
    assert len(layer_step.demand(visit, [2, 3, 4, 5])) == 2  # the running lookup's stay
    layer_step.queue.carry()
    visit = look_up(layer_step, 0, 2, 3, step=2)
    assert len(layer_step.demand(visit, [4, 5])) == 2 and held(layer_step, 0) == [
        2,
        3,
        4,
        5,
    ]


def test_prefetch_leaves_half_of_the_room():
    script = {0: [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]}
    layer_step = make(slots=8, script=script, horizon=2)
    prefetch(layer_step, 0, 0)
    assert layer_step.queue.asked == [("prefetch", 1, e) for e in range(4)]
    prefetch(layer_step, 0, 0)  # they are expected already
    assert len(layer_step.queue.asked) == 4


def test_prefetch_keeps_to_its_limit_and_to_the_room_of_each_layer():
    layer_S = (1,) * 6 + (2,) * 2
    script = {0: [[5, 4], [5, 4]]}
    layer_step = make(layer_S=layer_S, script=script, horizon=2)
    assert layer_step.cache.room_L == [0, 6, 2]
    prefetch(layer_step, 0, 0)
    assert layer_step.queue.asked == [
        *[("prefetch", 1, 5), ("prefetch", 1, 4)],
        ("prefetch", 2, 5),
    ]
    layer_step = make(layer_S=layer_S, script=script, horizon=2, prefetch_limit=1)
    prefetch(layer_step, 0, 0)
    assert layer_step.queue.asked == [("prefetch", 1, 5)]


def test_prefetch_passes_over_a_layer_without_room():
    layer_S = (1,) * 2 + (2,) * 4
    layer_step = make(layer_S=layer_S, script={0: [[5, 4], [5, 4]]}, horizon=2)
    prefetch(layer_step, 0, 0)
    assert layer_step.queue.asked == [
        *[("prefetch", 1, 5), ("prefetch", 2, 5)],
        ("prefetch", 2, 4),
    ]


def test_prefetch_wraps_to_the_next_token():
    layer_step = make(script={2: [[3]]})
    prefetch(layer_step, 2, 0)
    assert layer_step.queue.asked == [("prefetch", 0, 3)]


def test_block_prefetched_too_early_is_used_all_the_same():
    layer_step = make(script={0: [[2]]})
    prefetch(layer_step, 0, 0)
    layer_step.queue.carry()
    look_up(layer_step, 1, 4)
    look_up(layer_step, 1, 2, step=1)
    assert E + 2 in layer_step.queue.used_keys


def test_fetch_stops_at_the_first_that_finds_no_slot():
    layer_step = make(slots=2)
    bring(layer_step, 0, 0, 1)
    visit = look_up(layer_step, 0, 0, 1, step=1)
    assert layer_step.demand(visit, [2, 3]) == []  # both slots are the running lookup's
    layer_step.cache.release()
    busy = layer_step.cache.slot_LE[0, [0]].tolist()
    (transfer,) = layer_step.demand(visit, [2, 3], busy)
    assert held(layer_step, 0) == [0, 2] and transfer.expert == 2


def test_drain_leaves_nothing_on_its_way():
    layer_step = make(script={0: [[2, 3]]})
    transfers = layer_step.demand(look_up(layer_step, 0, 0, 1), [0, 1])
    prefetch(layer_step, 0, 0)
    layer_step.drain()
    assert all(transfer.done for transfer in transfers)
    assert layer_step.queue.waiting == [] and layer_step.queue.cancelled == 2
    assert held(layer_step, 0) == [0, 1] and held(layer_step, 1) == []
    assert found(look_up(layer_step, 1, 2, 3)) == ([], [], [2, 3])


def test_a_layer_in_waves_counts_the_seconds_of_its_drain():
    layer_step = make()
    layer_step.demand(look_up(layer_step, 0, 0, 1), [0, 1])
    visit = look_up(layer_step, 1, 2, 3)
    layer_step.begin_waves(visit)
    assert visit.waited_s == 2.0
    layer_step.begin_waves(visit)  # nothing is on its way: no wait
    layer_step.finish(visit)
    assert counts(layer_step) == (0, 0, 0, 2.0)


def test_new_sequence_keeps_blocks_and_forgets_the_rest():
    layer_step = make(script={0: [[2, 3]]})
    bring(layer_step, 0, 0, 1)
    prefetch(layer_step, 0, 0)
    layer_step.drain()
    layer_step.finish_sequences()
    assert held(layer_step, 0) == [0, 1] and held(layer_step, 1) == []
    assert found(look_up(layer_step, 0, 0, 1)) == ([0, 1], [], [])


def test_counters_begin_again_and_movement_follows():
    layer_step, report = make(), LayerReport()
    report.queue, report.statistics = layer_step.queue, layer_step.statistics
    assert report.movement() == {"hit_ratio": None, "bytes_moved": 0}
    bring(layer_step, 0, 0, 1)
    bring(layer_step, 0, 0, 2)
    assert report.movement() == {"hit_ratio": 0.25, "bytes_moved": 3}
    layer_step.reset_counters()
    assert report.movement() == {"hit_ratio": None, "bytes_moved": 0}
    bring(layer_step, 0, 0, 2)
    assert report.movement() == {"hit_ratio": 1.0, "bytes_moved": 0}


def test_prefill_is_counted_apart():
    layer_step = make()
    visit = layer_step.look_up(0, np.array([[0, 1]]), None, 0, is_decode=False)
    layer_step.bring(visit)
    layer_step.finish(visit)
    assert counts(layer_step) == (0, 0, 0, 0)
    assert layer_step.counters[False].misses == 2


def test_predictions_are_scored():
    layer_step = make(script={0: [[2, 3]]})
    prefetch(layer_step, 0, 0)
    layer_step.predictor_run.observe(1, np.array([[2, 4]]), None)
    assert layer_step.predictor_run.accuracy.recall_LA[1].tolist() == [0.5]
    assert layer_step.predictor_run.accuracy.precision_LA[1].tolist() == [0.5]


def test_events_tell_hits_misses_and_waits():
    layer_step = make(recorder=Recorder())
    bring(layer_step, 0, 0, 1)
    bring(layer_step, 0, 0, 2, step=1)
    order = ("hit", "miss", "wait").index
    events = sorted(layer_step.recorder.events(), key=lambda e: (e.t_s, order(e.kind)))
    events = [(e.kind, e.expert, e.step) for e in events]
    assert events == [
        *[("miss", 0, 0), ("miss", 1, 0), ("wait", None, 0)],
        *[("hit", 0, 1), ("miss", 2, 1), ("wait", None, 1)],
    ]


def test_hits_and_misses_of_a_layer_in_waves_hold_the_law():
    """Misses are demand transfers; hits, distinct experts that needed none."""
    layer_step = make(slots=2)
    bring(layer_step, 0, 0, 1)
    layer_step.reset_counters()
    # Token 0 throws out expert 1, which was there and which token 1 wants; expert 2
    # travels twice.
    ids_TK = np.array([[0, 2], [3, 1], [2, 0]], np.int32)
    visit = pass_layer(layer_step, 0, ids_TK, None, 1)
    assert visit.in_waves
    assert layer_step.queue.stats().demand.count == visit.moved == len(visit.missed)
    assert visit.missed == [2, 1, 3, 0, 2] and visit.hits == []
    assert counts(layer_step)[:3] == (0, 5, 0)
    visit = pass_layer(layer_step, 0, np.array([[0, 2], [1, 2]], np.int32), None, 2)
    assert (visit.hits, visit.missed) == ([0, 2], [1])
    assert counts(layer_step)[:3] == (2, 6, 0)
    assert layer_step.statistics.waves == {True: 2, False: 0}


def test_what_a_cpu_assist_computes_does_not_travel():
    layer_step = make(slots=3)
    bring(layer_step, 0, 0)
    layer_step.reset_counters()
    ids_TK = np.array([[0, 2, 3]], np.int32)
    given = 0, ids_TK, None, 1
    visit = pass_layer(layer_step, *given, on_host=lambda absent, ids_TK: absent[1:])
    assert (visit.hits, sorted(visit.missed)) == ([0], [2, 3])
    assert layer_step.queue.stats().demand.count == 1
    assert np.flatnonzero(layer_step.cache.resident(0)).tolist() == [0, 2]


def test_prefetches_that_a_wave_layer_drains_count_once():
    layer_step = make(slots=3, script={0: [[2, 3]]})
    prefetch(layer_step, 0, 0)
    visit = pass_layer(layer_step, 1, np.array([[2, 3], [4, 5]], np.int32), None, 0)
    assert visit.late == [] and sorted(visit.missed) == [2, 3, 4, 5]
    assert layer_step.queue.stats().demand.count == counts(layer_step)[1] == 4
