"""Neighbours in the store travel as one: computed and real time alike."""

import dataclasses
import threading

import numpy as np
import pytest

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.offload.slots import AliasedSlots, DonatedSlots
from tests.offload.test_transfer_queue import (
    BLOCK,
    EXPERTS,
    LAYERS,
    SIZE,
    GateLink,
    contents,
    events_of,
    queue_of,
)
from tests.support.slot_kinds import KINDS, on_cpu


def virtual(**link):
    # 3 s of latency and 1 s a block.
    link = EmulatedLink(1.0, 3.0, **link)
    return BlockQueue([ComputedCarrier(link, block_bytes=1, num_experts=8)])


def ask(queue, experts, cause="demand", layer=0, slot=0):
    blocks = [(layer, e, slot + i) for i, e in enumerate(experts)]
    return queue.request_all(blocks, cause)


def arrivals(transfers):
    return [transfer.arrival_s for transfer in transfers]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_asked_for_is_nothing_moved(asynchronous):
    slots = DonatedSlots(2, BLOCK, np.float32)
    with queue_of(slots, asynchronous=asynchronous) as queue:
        assert queue.request_all([], "demand") == []
    assert virtual().request_all([], "demand") == []


def test_neighbours_pay_one_latency_where_the_most_urgent_of_them_goes():
    queue = virtual()
    transfers = ask(queue, [6, 2, 4, 1])  # runs: 6; 1 and 2; 4
    assert queue.wait(transfers) == 4 + 5 + 4
    assert arrivals(transfers) == [4, 9, 13, 9]
    stats = queue.stats()
    assert (stats.demand.count, stats.demand.bytes) == (4, 4)
    assert (stats.demand.seconds, stats.merged) == (13, 1)
    assert [transfer.seconds for transfer in transfers] == [4, 2.5, 4, 2.5]


@pytest.mark.parametrize(
    "requests",
    [
        [[(0, 1, 0)], [(0, 2, 1)]],  # not asked for together
        [[(0, 7, 0), (1, 0, 1)]],  # of two layers
        [[(0, 1, 0), (1, 2, 1)]],
        [[(0, 1, 0), (0, 3, 1)]],
    ],
)
def test_others_travel_alone(requests):
    queue = virtual()
    transfers = [t for blocks in requests for t in queue.request_all(blocks, "demand")]
    assert queue.wait(transfers) == 8 and queue.stats().merged == 0


def test_a_link_may_refuse_to_merge():
    queue = virtual(merges=False)
    assert queue.wait(ask(queue, [1, 2, 3])) == 12 and queue.stats().merged == 0


def test_a_part_that_is_taken_back_cuts_the_run():
    queue = virtual()
    transfers = ask(queue, [1, 2, 3, 4], "prefetch")
    assert queue.cancel_prefetches({1, 3, 4}) == [(0, 2, 1)]
    queue.wait([transfers[0], transfers[3]])
    assert arrivals(transfers) == [4, 0, 9, 9]
    assert (queue.stats().cancelled, queue.stats().merged) == (1, 1)


def test_a_part_that_is_needed_now_leaves_its_run():
    queue = virtual()
    transfers = ask(queue, [1, 2, 3], "prefetch")
    queue.promote(transfers[1])
    demand = ask(queue, [4], slot=5)  # no part of that run
    queue.wait([*transfers, *demand])
    assert arrivals([*transfers, *demand]) == [12, 4, 16, 8]
    # Parts that became demands one after another still travel as one.
    transfers = ask(queue, [1, 2, 3], "prefetch", layer=1)
    for transfer in transfers:
        queue.promote(transfer)
    assert queue.wait(transfers) == 6 and queue.stats().demand.count == 5


def test_a_run_under_way_is_not_interrupted():
    queue = virtual()
    run = ask(queue, [1, 2, 3], "prefetch")
    queue.carriers[0].now_s = 0.5
    queue.poll()
    (demand,) = ask(queue, [7], slot=5)
    assert queue.wait([demand]) == 9.5 and arrivals(run) == [6, 6, 6]
    assert queue.cancel_prefetches() == []


class CountingLink(EmulatedLink):
    """Notes the bytes of every transfer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sent = []

    def transfer(self, num_bytes, ready_s, copy, *args):
        self.sent.append(num_bytes)
        return super().transfer(num_bytes, ready_s, copy, *args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_real_neighbours_are_one_transfer_of_several_rows(kind, asynchronous):
    link = CountingLink(BLOCK / 1e-3, 5e-3)
    slots = kind(8, SIZE, np.float32)
    with queue_of(slots, link, asynchronous=asynchronous) as queue:
        transfers = queue.request_all([(3, 4, 0), (3, 0, 7), (3, 5, 2)], "demand", 9)
        queue.wait(transfers)
        assert link.sent == [2 * BLOCK, BLOCK]
        assert contents(queue) == [304, 0, 305, 0, 0, 0, 0, 300]
        events, stats = events_of(queue), queue.stats()
    assert [(e.layer, e.expert, e.step, e.bytes) for e in events] == [
        *[(3, 4, 9, BLOCK), (3, 5, 9, BLOCK), (3, 0, 9, BLOCK)]
    ]
    # Events share the time of their transfer: they follow one another.
    assert events[1].t_s == pytest.approx(events[0].t_s + events[0].dur_s)
    assert sum(e.dur_s for e in events) == pytest.approx(stats.demand.seconds)
    assert (stats.demand.count, stats.demand.bytes, stats.merged) == (3, 3 * BLOCK, 1)


def test_runs_of_staged_blocks_keep_to_the_room():
    with queue_of(DonatedSlots(8, SIZE, np.float32)) as queue:
        transfers = queue.request_all([(1, e, e) for e in range(6)], "demand")
        queue.wait(transfers)
        assert contents(queue) == [100, 101, 102, 103, 104, 105, 0, 0]
        assert queue.stats().merged in (3, 4)  # four fit at first; two come later


@pytest.mark.parametrize("cause, runs", [("demand", [1, 3]), ("prefetch", 4 * [1])])
def test_a_device_takes_demands_that_are_no_neighbours_together(cause, runs):
    link, slots = GateLink(), DonatedSlots(8, SIZE, np.float32)
    with queue_of(slots, link) as queue:
        carried = noted(queue)
        first = queue.request(0, 0, 0, cause)
        assert link.begun.acquire(timeout=30)
        others = queue.request_all([(1, e, e // 2 + 1) for e in (1, 3, 5)], cause)
        link.open()
        queue.wait([first, *others])
        assert contents(queue)[:4] == [0, 101, 103, 105]
    assert [len(run) for run in carried] == runs


@on_cpu
def test_nobody_holds_the_lock_during_a_copy():
    link = GateLink()
    with queue_of(AliasedSlots(8, SIZE, np.float32), link) as queue:
        transfers = queue.request_all([(0, 0, 0), (0, 1, 1)], "demand")
        assert link.begun.acquire(timeout=30)
        lock = queue.carriers[0]._lock
        assert lock.acquire(timeout=30)
        lock.release()
        queue.request_all([(1, 0, 2)], "prefetch")
        assert queue.cancel_prefetches() == [(1, 0, 2)]
        link.open()
        queue.wait(transfers)


class Script:
    """Random requests, promotions and cancellations, for any queue."""

    def __init__(self, seed):
        rng, self.calls = np.random.default_rng(seed), []
        slot = 0
        for _ in range(12):
            experts = rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist()
            layer, cause = int(rng.integers(LAYERS)), rng.choice(["demand", "prefetch"])
            blocks = [(layer, e, slot + i) for i, e in enumerate(experts)]
            slot += len(blocks)
            self.calls.append((blocks, str(cause), rng.random(len(blocks)) < 0.2))
        self.slots, self.wrong = slot, set(rng.permutation(EXPERTS * LAYERS)[:6])

    def run(self, queue):
        transfers = []
        for blocks, cause, promoted in self.calls:
            asked = queue.request_all(blocks, cause)
            for transfer, is_promoted in zip(asked, promoted, strict=True):
                if is_promoted:
                    queue.promote(transfer)
            transfers += asked
        queue.cancel_prefetches(lambda key: key not in self.wrong)
        return [t for t in transfers if t.state != "cancelled"]


def noted(queue) -> list:
    """What travels as one from here on, run by run."""
    (carrier,), runs = queue.carriers, []
    carried = carrier._carried

    def noting(run, start_s, end_s):
        carried(run, start_s, end_s)
        runs.append([(t.cause, t.layer, t.expert) for t in run])

    carrier._carried = noting
    return runs


@on_cpu
@pytest.mark.parametrize("seed", range(8))
def test_computed_and_real_queues_carry_the_same_runs_in_the_same_order(seed):
    script = Script(seed)
    carrier = ComputedCarrier(EmulatedLink(1.0, 1.0), BLOCK, EXPERTS)
    computed = BlockQueue([carrier])
    computed_runs = noted(computed)
    first = computed.request(0, 0, script.slots, "demand")
    carrier.now_s = 1.0
    computed.poll()  # under way while all others are asked for
    computed.wait([first, *script.run(computed)])
    link, slots = GateLink(), AliasedSlots(script.slots + 1, SIZE, np.float32)
    with queue_of(slots, link) as real:
        real_runs = noted(real)
        first = real.request(0, 0, script.slots, "demand")
        assert link.begun.acquire(timeout=30)
        transfers = script.run(real)
        link.open()
        real.wait([first, *transfers])
        held = contents(real)
    assert real_runs == computed_runs and any(len(run) > 1 for run in real_runs)
    for transfer in transfers:
        assert held[transfer.slot] == 100 * transfer.layer + transfer.expert
    for name in ("merged", "cancelled"):
        assert getattr(real.stats(), name) == getattr(computed.stats(), name)


@dataclasses.dataclass(eq=False)
class YieldingLink(TransferLink):
    """Gives other threads a turn in the middle of every transfer."""

    event: threading.Event = dataclasses.field(default_factory=threading.Event)

    def transfer(self, num_bytes, ready_s, copy, *args):
        self.event.wait(1e-5)
        return super().transfer(num_bytes, ready_s, copy, *args)


@pytest.mark.parametrize("kind", KINDS)
def test_random_use_under_load_leaves_every_block_in_its_slot(kind):
    rng, slots = np.random.default_rng(3), 24
    with queue_of(kind(slots, SIZE, np.float32), YieldingLink()) as queue:
        moved = 0
        for _ in range(150):
            free = rng.permutation(slots).tolist()
            asked = []
            for cause in ("prefetch", "demand", "prefetch"):
                experts = rng.permutation(EXPERTS)[: rng.integers(1, 6)].tolist()
                layer = int(rng.integers(LAYERS))
                blocks = [(layer, e, free.pop()) for e in experts]
                asked += queue.request_all(blocks, cause)
            for transfer in asked[::5]:
                queue.promote(transfer)
            wrong = set(rng.permutation(LAYERS * EXPERTS)[:8].tolist())
            queue.cancel_prefetches(lambda key, wrong=wrong: key not in wrong)
            asked = [t for t in asked if t.state != "cancelled"]
            queue.wait(asked)
            held, moved = contents(queue), moved + len(asked)
            for transfer in asked:
                assert held[transfer.slot] == 100 * transfer.layer + transfer.expert
        stats = queue.stats()
        assert stats.demand.count + stats.prefetch.count == moved
        assert stats.demand.bytes + stats.prefetch.bytes == moved * BLOCK
        assert 0 < stats.merged < moved
