"""Demands that programs fetch from pinned memory, prefetches that a thread brings."""

import time

import jax
import numpy as np
import pytest

from moe_edge.core.events import Recorder
from moe_edge.offload import indexed_slots
from moe_edge.offload.direct_carrier import DirectCarrier
from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.link import TransferLink
from moe_edge.offload.store import host_sharding
from moe_edge.offload.transfer_queue import TransferQueue
from tests.offload.test_transfer_queue import BLOCK, EXPERTS, SIZE, Store
from tests.support.compilations import compilations


class PinnedStore(Store):
    """The same records in pinned memory."""

    def source(self, layer, expert):
        return jax.device_put(super().record(layer, expert), host_sharding())

    record = source


def make(**options):
    slots = IndexedSlots(8, SIZE, np.float32)
    given = PinnedStore(), slots, TransferLink(), Recorder()
    return TransferQueue([DirectCarrier(*given, **options)])


def contents(queue):
    return np.array(queue.slots.array)[:, 0].tolist()


def noting_programs(monkeypatch) -> list[int]:
    """Blocks of each program that writes slots from here on."""
    found, write = [], indexed_slots._write

    def noted(slots_SR, numbers, records):
        found.append(len(numbers))
        return write(slots_SR, numbers, records)

    monkeypatch.setattr(indexed_slots, "_write", noted)
    return found


def test_demands_are_done_when_asked_for_and_in_their_slots():
    with make() as queue:
        before, pointer = queue.slots.array, queue.slots.array.unsafe_buffer_pointer()
        transfers = queue.request_all([(3, e, e + 1) for e in (0, 2, 5)], "demand")
        assert all(transfer.done for transfer in transfers)
        queue.wait(transfers)
        assert contents(queue) == [0, 300, 0, 302, 0, 0, 305, 0]
        assert before.is_deleted()
        assert queue.slots.array.unsafe_buffer_pointer() == pointer
        stats = queue.stats()
        assert stats.demand.count == 3 and stats.demand.bytes == 3 * BLOCK
        events = queue.carriers[0].recorder.events()
    assert [(e.cause, e.layer, e.expert) for e in events] == [
        ("demand", 3, e) for e in (0, 2, 5)
    ]


@pytest.mark.parametrize(
    "blocks, programs", [(1, [1]), (3, [2, 1]), (6, [4, 2]), (8, [8])]
)
def test_no_demand_travels_twice(blocks, programs, monkeypatch):
    with make() as queue:
        found = noting_programs(monkeypatch)
        where = [(s // EXPERTS, s % EXPERTS, s) for s in range(blocks)]
        queue.request_all(where, "demand")
        want = [100 * layer + expert for layer, expert, _ in where]
        assert contents(queue) == want + (8 - blocks) * [0]
    assert found == programs


def test_staged_blocks_of_a_wait_go_into_slots_by_one_program(monkeypatch):
    with make() as queue:
        found = noting_programs(monkeypatch)
        transfers = [queue.request(1, e, e, "prefetch") for e in range(5)]
        for transfer in transfers:
            queue.promote(transfer)
        queue.wait(transfers)
        assert contents(queue) == [100, 101, 102, 103, 104, 0, 0, 0]
    assert found == [8]  # five blocks, the last one again


def test_prefetches_travel_by_the_thread_while_demands_are_fetched():
    with make() as queue:
        early = queue.request_all([(1, 0, 0), (1, 3, 1)], "prefetch")
        late = queue.request(2, 4, 2, "demand")
        assert late.done
        deadline = time.monotonic() + 30
        while not all(t.done for t in early) and time.monotonic() < deadline:
            queue.poll()
            time.sleep(1e-3)
        assert contents(queue)[:3] == [100, 103, 204]
        stats = queue.stats()
    assert (stats.demand.count, stats.prefetch.count) == (1, 2)
    assert stats.unused_bytes == 2 * BLOCK


@pytest.mark.parametrize("timed", [True, False])
def test_a_demand_waits_for_its_bytes_only_where_times_are_read(timed, monkeypatch):
    waited = []
    with make(timed=timed) as queue:
        kind = type(queue.slots.array)
        block = kind.block_until_ready
        monkeypatch.setattr(
            kind, "block_until_ready", lambda a: (waited.append(1), block(a))[1]
        )
        transfer = queue.request(0, 1, 0, "demand")
        assert bool(waited) == timed
        assert transfer.seconds > 0
        assert contents(queue)[0] == 1


def test_nothing_is_compiled_once_the_queue_stands():
    with make() as queue:
        with compilations() as seen:
            for count in (*range(1, 9), 3, 8):
                blocks = [(s // EXPERTS, s % EXPERTS, s) for s in range(count)]
                queue.request_all(blocks, "demand")
                early = queue.request_all(blocks, "prefetch")
                for transfer in early:
                    queue.promote(transfer)
                queue.wait(early)
        assert not seen
        assert contents(queue) == [0, 1, 2, 3, 4, 5, 100, 101]


def test_queue_goes_on_after_a_demand_that_failed():
    with make() as queue:
        with pytest.raises(KeyError, match="no expert 6"):
            queue.request_all([(0, 1, 0), (0, EXPERTS, 1)], "demand")
        assert queue.stats().demand.count == 0
        assert queue.request(0, 2, 1, "demand").done
        queue.slots.array.delete()  # as by a program that failed
        queue.recover()
        queue.request(0, 5, 3, "demand")
        assert contents(queue) == [0, 0, 0, 5, 0, 0, 0, 0]
        assert queue.slots.array.committed
    with pytest.raises(RuntimeError, match="queue is closed"):
        queue.request(0, 1, 0, "demand")
