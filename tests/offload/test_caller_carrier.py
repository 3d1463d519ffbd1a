"""Blocks carried by whoever asks: same order and times as in computed time."""

import threading

import numpy as np
import pytest

from moe_edge.core.events import Recorder
from moe_edge.kernels import native
from moe_edge.offload import link as links
from moe_edge.offload import real_carrier
from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.slots import AliasedSlots
from moe_edge.offload.transfer_queue import TransferQueue
from tests.offload.test_merged_transfers import Script, noted
from tests.offload.test_transfer_queue import BLOCK, EXPERTS, SIZE, Store, contents
from tests.support.slot_kinds import on_cpu

pytestmark = on_cpu


def make(slots=8, **options):
    options.setdefault("recorder", Recorder())
    slots = AliasedSlots(slots, SIZE, np.float32)
    return TransferQueue([CallerCarrier(Store(), slots, copy=native.copy, **options)])


class Clock:
    """In place of `time`: it all but stands still unless somebody sleeps."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        self.now_s += 1e-9  # no two looks at the same moment
        return self.now_s

    def sleep(self, seconds):
        self.now_s += max(seconds, 1e-6)


def slow_copies(clock, monkeypatch):
    """3 s each."""
    row = AliasedSlots.row

    def slowly(slots, slot):
        clock.now_s += 3.0
        return row(slots, slot)

    monkeypatch.setattr(AliasedSlots, "row", slowly)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    monkeypatch.setattr(real_carrier, "time", clock)
    return clock


def on(clock, queue):
    queue.carriers[0].clock = clock.perf_counter
    return queue


def test_without_an_emulated_link_a_block_is_there_when_the_request_returns():
    threads, queue = threading.active_count(), make()
    transfers = queue.request_all([(3, e, e + 1) for e in range(5)], "prefetch")
    assert all(transfer.done for transfer in transfers)
    assert contents(queue) == [0, 300, 301, 302, 303, 304, 0, 0]
    assert threading.active_count() == threads


def test_copying_a_demand_is_waiting_for_it(clock, monkeypatch):
    slow_copies(clock, monkeypatch)
    queue = on(clock, make())
    prefetched = queue.request(0, 1, 0, "prefetch")
    assert queue.wait([prefetched]) == pytest.approx(0, abs=1e-6)
    demands = queue.request_all([(0, e, e) for e in (2, 4)], "demand")
    assert queue.wait([]) == 0.0
    assert queue.wait(demands) == pytest.approx(6.0, abs=1e-3)
    assert queue.wait(demands) == pytest.approx(0, abs=1e-6)
    assert queue.stats().wait_s == pytest.approx(6.0, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_it_carries_the_runs_of_computed_time_in_the_same_order(seed, clock):
    script, queues = Script(seed), []
    for is_computed in (True, False):
        link = EmulatedLink(BLOCK, 1.0)  # 1 s of latency and 1 s a block
        if is_computed:
            carrier = ComputedCarrier(link, BLOCK, EXPERTS)
            carrier.now_s, queue = clock.now_s, BlockQueue([carrier])
        else:
            queue = on(clock, make(script.slots + 1, link=link))
        runs = noted(queue)
        first = queue.request(0, 0, script.slots, "demand")
        if is_computed:
            carrier.now_s += 1e-3
            queue.poll()  # begins, as the other did at once
        transfers = script.run(queue)
        queue.wait([first, *transfers])
        queues.append((queue, runs, first, transfers))
    (computed, want, *_, expected), (carried, runs, *_, found) = queues
    assert runs == want and any(len(run) > 1 for run in runs)
    for transfer in found:
        held = contents(carried)[transfer.slot]
        assert held == 100 * transfer.layer + transfer.expert
    for name in ("merged", "cancelled"):
        assert getattr(carried.stats(), name) == getattr(computed.stats(), name)
    base_s = queues[0][2].arrival_s, queues[1][2].arrival_s
    after_s = [
        [transfer.arrival_s - base for transfer in transfers]
        for transfers, base in zip((expected, found), base_s, strict=True)
    ]
    np.testing.assert_allclose(after_s[1], after_s[0], atol=1e-2)


def test_who_looks_late_finds_transfers_dated_to_when_the_link_was_free(clock):
    queue = on(clock, make(link=EmulatedLink(BLOCK / 1.0)))  # 1 s a block
    transfers = queue.request_all([(0, e, e) for e in (0, 2, 4)], "prefetch")
    assert [transfer.state for transfer in transfers] == ["done", "queued", "queued"]
    clock.now_s += 2.5  # two more have begun meanwhile, and one of them has ended
    queue.poll()
    assert [transfer.state for transfer in transfers] == 3 * ["done"]
    assert [transfer.done for transfer in transfers] == [True, True, False]
    begun_s = transfers[0].requested_s
    arrivals_s = [transfer.arrival_s - begun_s for transfer in transfers]
    # None arrives before it is copied; the link was not idle for it.
    np.testing.assert_allclose(arrivals_s, [1, 2.5, 3], atol=1e-6)
    np.testing.assert_allclose([transfer.seconds for transfer in transfers], 1)
    assert queue.wait(transfers) == pytest.approx(0.5, abs=1e-3)


def test_a_demand_overtakes_what_has_not_begun(clock):
    queue = on(clock, make(link=EmulatedLink(BLOCK / 1.0)))
    prefetches = queue.request_all([(0, e, e) for e in (0, 2, 4)], "prefetch")
    demand = queue.request(1, 0, 6, "demand")
    assert queue.wait([demand]) == pytest.approx(2.0, abs=1e-3)
    assert [transfer.state for transfer in prefetches] == ["done", "queued", "queued"]
    assert queue.cancel_prefetches() == [(0, 4, 4)]  # the other has begun by now
    with pytest.raises(RuntimeError, match="expert 4: .* cancelled"):
        queue.wait(prefetches)
    assert contents(queue) == [0, 0, 2, 0, 0, 0, 100, 0]


@pytest.mark.parametrize("how", ["request", "promote", "cancel_prefetches"])
def test_what_has_begun_by_now_is_neither_overtaken_nor_taken_back(how, clock):
    queue = on(clock, make(link=EmulatedLink(BLOCK / 1.0)))
    prefetches = queue.request_all([(0, e, e) for e in (0, 2, 4)], "prefetch")
    clock.now_s += 1.5  # the second one travels, but nobody has looked
    if how == "request":
        demand = queue.request(1, 0, 6, "demand")
        assert queue.wait([demand]) == pytest.approx(1.5, abs=1e-3)
    elif how == "promote":
        queue.promote(prefetches[2])
        assert queue.wait([prefetches[2]]) == pytest.approx(1.5, abs=1e-3)
    else:
        assert queue.cancel_prefetches() == [(0, 4, 4)]
    assert prefetches[1].done or how == "cancel_prefetches"
    assert prefetches[1].state == "done"


def test_an_interrupted_copy_never_arrives(monkeypatch):
    def interrupted(slots, slot):
        raise KeyboardInterrupt

    queue = make()
    with monkeypatch.context() as patch:
        patch.setattr(AliasedSlots, "row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.request(0, 1, 0, "demand")
    with pytest.raises(RuntimeError, match="interrupted; call the engine's `recover`"):
        queue.poll()


def test_a_copy_slower_than_the_link_makes_the_transfer_longer(clock, monkeypatch):
    slow_copies(clock, monkeypatch)
    queue = on(clock, make(link=EmulatedLink(BLOCK / 1.0)))
    transfer = queue.request(0, 1, 0, "demand")
    assert transfer.arrival_s == pytest.approx(transfer.requested_s + 3.0, abs=1e-3)


def test_error_stays_until_recovery():
    queue = make()
    with pytest.raises(KeyError, match="no expert 6"):
        queue.request(0, EXPERTS, 0, "demand")
    for again in (queue.poll, lambda: queue.request(0, 1, 2, "demand")):
        with pytest.raises(KeyError):
            again()
    queue.recover()
    queue.wait(queue.request_all([(1, e, e) for e in range(3)], "demand"))
    assert contents(queue)[:3] == [100, 101, 102]


def test_closed_and_refused():
    queue = make(link=EmulatedLink(BLOCK / 60.0))
    first = queue.request_all([(0, 0, 0), (0, 2, 5)], "prefetch")
    with pytest.raises(RuntimeError, match="slot 5 awaits layer 0, expert 2"):
        queue.request(0, 3, 5, "demand")
    with pytest.raises(IndexError, match="slot 8; there are 8"):
        queue.request(0, 0, 8, "demand")
    queue.close()
    queue.close()  # twice is fine
    for again in (queue.poll, lambda: queue.wait(first)):
        with pytest.raises(RuntimeError, match="queue is closed"):
            again()


def test_time_passes_while_nobody_looks(clock):
    queue = on(clock, make(link=EmulatedLink(BLOCK / 1.0)))
    transfer = queue.request(0, 0, 0, "demand")
    clock.now_s += 1.0
    assert transfer.done and queue.wait([transfer]) == pytest.approx(0, abs=1e-6)


def test_serial_requests_go_on_after_one_that_failed():
    slots = AliasedSlots(4, SIZE, np.float32)
    queue = TransferQueue([CallerCarrier(Store(), slots, serial=True)])
    with pytest.raises(KeyError, match="no expert 6"):
        queue.request_all([(0, 1, 0), (0, EXPERTS, 1), (0, 3, 2)], "demand")
    assert contents(queue) == [1, 0, 0, 0]
    # What was not reached is taken back: its slots are free for others.
    assert queue.request_all([(1, 2, 1), (1, 4, 2)], "prefetch")[1].done
    assert contents(queue) == [1, 102, 104, 0]
    assert queue.stats().demand.count == 1
