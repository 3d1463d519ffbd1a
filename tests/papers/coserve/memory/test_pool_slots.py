"""Experts that differ in size, carried into a pool by the transfer queue."""

import threading
import time

import jax
import numpy as np
import pytest

from moe_edge.core.events import Recorder
from moe_edge.offload.link import EmulatedLink, SharedLink, Turns
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.transfer_queue import TransferQueue
from moe_edge.papers.coserve.memory.pool_slots import PoolSlots, to_host
from tests.support.host_kernels import host_device

SIZES = (128, 320, 64)


class Store:
    """Records that name their expert; number 2 is lost."""

    num_experts, subs, block_bytes = len(SIZES), 1, max(SIZES)

    def num_bytes(self, layer, expert):
        return SIZES[expert]

    def record(self, layer, expert):
        if expert == 2:
            raise OSError("expert 2 is gone")
        return np.full(SIZES[expert], expert + 1, np.uint8)

    source = record


def make(link=None):
    slots = PoolSlots(len(SIZES), jax.devices()[0])
    given = Store(), slots, link, Recorder()
    return TransferQueue([CallerCarrier(*given, serial=True)])


def test_experts_of_all_sizes_come_and_go():
    queue = make()
    slots = queue.slots
    for expert in (0, 1):
        assert queue.request(0, expert, expert, "demand").done
    assert slots.num_bytes == SIZES[0] + SIZES[1]
    for expert, array in slots.arrays.items():
        np.testing.assert_array_equal(array, Store().record(0, expert))
    assert [event.bytes for event in queue.carriers[0].recorder.events()] == [128, 320]
    total = queue.stats().demand
    assert (total.count, total.bytes) == (2, 448)
    left = to_host(slots.take(1))
    assert list(slots.arrays) == [0]
    slots.write(1, left)
    np.testing.assert_array_equal(slots.arrays[1], Store().record(0, 1))


def test_on_the_host_what_was_taken_is_used_as_it_is():
    slots = PoolSlots(2, host_device())
    slots.write(1, Store().record(0, 1))
    left = to_host(slots.take(1))
    slots.write(1, left)
    pointer = slots.arrays[1].unsafe_buffer_pointer()
    assert pointer == left.unsafe_buffer_pointer()


def test_weights_are_copied_from_the_file_and_aligned():
    record = Store().record(0, 1)
    slots = PoolSlots(2, host_device())
    slots.write(1, record)
    record[:] = 0
    assert slots.arrays[1].unsafe_buffer_pointer() % 64 == 0
    np.testing.assert_array_equal(slots.arrays[1], np.full(SIZES[1], 2, np.uint8))


def test_what_is_lost_is_not_there_and_others_come_after_it():
    queue = make()
    for _ in range(2):
        with pytest.raises(OSError, match="expert 2 is gone"):
            queue.request(0, 2, 2, "demand")
    queue.request(0, 0, 0, "demand")
    assert list(queue.slots.arrays) == [0]


def test_links_that_share_a_disk_carry_one_after_another():
    disk, latencies_s = Turns(), (0.02, 0.02, 0.01)
    links = [SharedLink(EmulatedLink(1e12, s), disk) for s in latencies_s]
    assert links[2].emulated and links[2].describe()["latency_s"] == 0.01
    ends, started = [], time.perf_counter()

    def load(queue):
        queue.request(0, 0, 0, "demand")
        ends.append(time.perf_counter() - started)

    threads = [threading.Thread(target=load, args=(make(link),)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(ends) >= 0.05
    assert sorted(ends)[1] >= 0.03
