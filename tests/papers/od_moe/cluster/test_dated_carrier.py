"""A carrier by the clock: what has begun by now is not overtaken."""

import pytest

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.papers.od_moe.cluster import worker_slots
from moe_edge.papers.od_moe.cluster.worker_slots import DatedCarrier


class Clock:
    """Stands in for the module `time`; a test sets `now_s`."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Blocks:
    """A store and its slots in one: a record is its own name."""

    block_bytes, num_experts = 8, 10

    def __init__(self):
        self.written = {}

    def record(self, layer, expert):
        return layer, expert

    def write(self, slot, record_R):
        self.written[slot] = record_R


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(worker_slots, "time", clock)
    return clock


def test_demand_does_not_overtake_prefetches_that_have_begun(clock):
    blocks = Blocks()
    queue = BlockQueue(
        [DatedCarrier(blocks, blocks, bytes_per_s=8.0)]
    )  # a block a second
    prefetches = [queue.request(0, expert, expert, "prefetch") for expert in range(3)]
    clock.now_s = 1.5  # the second one is on its way
    demand = queue.request(0, 3, 3, "demand")
    assert queue.wait([demand]) == pytest.approx(1.5)
    assert demand.arrival_s == pytest.approx(3.0)
    queue.wait(prefetches)
    assert [t.arrival_s for t in prefetches] == pytest.approx([1.0, 2.0, 4.0])
    assert blocks.written == {slot: (0, slot) for slot in range(4)}
