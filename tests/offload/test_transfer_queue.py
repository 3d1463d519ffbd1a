import threading
import time

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.events import Recorder
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.slots import DonatedSlots
from moe_edge.offload.thread_carrier import ThreadCarrier
from moe_edge.offload.transfer_queue import TransferQueue
from tests.support.slot_kinds import KINDS, OWN

LAYERS, EXPERTS, SIZE = 4, 6, 32
BLOCK = 4 * SIZE  # bytes


class Store:
    """Records that name themselves: layer * 100 + expert everywhere."""

    num_experts, subs, block_bytes = EXPERTS, 1, BLOCK

    def record(self, layer, expert):
        if expert >= EXPERTS:
            raise KeyError(f"no expert {expert}")
        return np.full(SIZE, 100 * layer + expert, np.float32)

    source = record

    def num_bytes(self, layer, expert):
        return BLOCK


class GateLink(TransferLink):
    """Lets a transfer end only when the test says so."""

    def __init__(self):
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def transfer(self, num_bytes, ready_s, copy, *args):
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        return super().transfer(num_bytes, ready_s, copy, *args)

    def open(self):
        self.may_end.release(1000)


def queue_of(slots, link=None, recorder=None, asynchronous=True):
    """Over `Store`, by a thread or serially."""
    given = Store(), slots, link, Recorder() if recorder is None else recorder
    if asynchronous:
        return TransferQueue([ThreadCarrier(*given)])
    return TransferQueue([CallerCarrier(*given, serial=True)])


def make(kind=OWN, slots=8, **options):
    return queue_of(kind(slots, SIZE, np.float32), **options)


def contents(queue):
    return np.array(queue.slots.array)[:, 0].tolist()


def events_of(queue):
    return queue.carriers[0].recorder.events()


def order(queue):
    events = events_of(queue)
    return [(event.cause, event.layer, event.expert) for event in events]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_block_is_in_its_slot_after_wait(kind, asynchronous):
    with make(kind, asynchronous=asynchronous) as queue:
        transfers = [queue.request(3, e, e + 1, "demand") for e in range(5)]
        assert queue.wait(transfers) >= 0 and all(
            transfer.done for transfer in transfers
        )
        assert contents(queue) == [0, 300, 301, 302, 303, 304, 0, 0]
        assert [transfer.key for transfer in transfers] == [18, 19, 20, 21, 22]


@pytest.mark.parametrize("kind", KINDS)
def test_poll_puts_arrived_blocks_into_slots(kind):
    with make(kind) as queue:
        transfer = queue.request(1, 2, 0, "prefetch")
        deadline = time.monotonic() + 30
        while not transfer.done and time.monotonic() < deadline:
            queue.poll()
            time.sleep(1e-3)
        assert contents(queue)[0] == 102


def test_staged_blocks_are_bounded_until_the_engine_takes_them():
    with make(DonatedSlots) as queue:
        transfers = [queue.request(0, e, e, "prefetch") for e in range(6)]
        deadline = time.monotonic() + 30
        while len(queue.carriers[0]._staged) < 4 and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.02)
        assert [transfer.state for transfer in transfers] == 4 * ["running"] + 2 * [
            "queued"
        ]
        queue.wait(transfers)
        assert contents(queue)[:6] == [0, 1, 2, 3, 4, 5]


def test_demand_overtakes_queued_prefetches():
    link = GateLink()
    with make(link=link) as queue:
        first = queue.request(0, 0, 0, "prefetch")
        assert link.begun.acquire(timeout=30)  # under way: not interrupted
        late = [queue.request(1, e, 1 + e, "prefetch") for e in range(2)]
        demands = [queue.request(2, e, 4 + e, "demand") for e in range(2)]
        link.open()
        queue.wait([first, *late, *demands])
        assert order(queue) == [
            *[("prefetch", 0, 0), ("demand", 2, 0), ("demand", 2, 1)],
            *[("prefetch", 1, 0), ("prefetch", 1, 1)],
        ]


def test_promoted_prefetch_overtakes_and_counts_as_demand():
    link = GateLink()
    with make(link=link) as queue:
        transfers = [queue.request(0, e, e, "prefetch") for e in range(4)]
        assert link.begun.acquire(timeout=30)
        queue.promote(transfers[3])
        queue.promote(transfers[0])  # already under way: stays a prefetch, but used
        link.open()
        queue.wait(transfers)
        assert order(queue) == [
            *[("prefetch", 0, 0), ("demand", 0, 3)],
            *[("prefetch", 0, 1), ("prefetch", 0, 2)],
        ]
        stats = queue.stats()
        assert (stats.demand.bytes, stats.prefetch.bytes) == (BLOCK, 3 * BLOCK)
        assert stats.unused_bytes == 2 * BLOCK and stats.wasted_bytes == 0


def test_demand_overtakes_on_an_emulated_link():
    for _ in range(50):  # the best one counts, for a busy machine delays
        with make(link=EmulatedLink(BLOCK / 10e-3)) as queue:  # 10 ms a block
            prefetches = [queue.request(0, e, e, "prefetch") for e in range(6)]
            demand = queue.request(1, 0, 6, "demand")
            waited_s = queue.wait([demand])
            earlier = sum(transfer.done for transfer in prefetches)
        if earlier <= 2 and 9e-3 < waited_s:
            break
    assert earlier <= 2 and 9e-3 < waited_s


@pytest.mark.parametrize("kind", KINDS)
def test_copied_block_is_not_there_before_the_link_has_delivered_it(kind):
    with make(kind, link=EmulatedLink(BLOCK / 0.2)) as queue:
        begun_s = time.perf_counter()
        transfer = queue.request(2, 1, 3, "prefetch")
        while transfer.state != "done" and time.perf_counter() < begun_s + 30:
            queue.poll()
            time.sleep(1e-3)
        assert transfer.state == "done"
        is_there, asked_s = transfer.done, time.perf_counter()
        assert not is_there or asked_s >= transfer.arrival_s
        assert transfer.arrival_s >= begun_s + 0.2 * (1 - 1e-9)
        queue.wait([transfer])
        assert transfer.done and time.perf_counter() - begun_s >= 0.2
        assert contents(queue)[3] == 201


@pytest.mark.parametrize("keep", [{1, 4}, lambda key: key in (1, 4)])
def test_cancel_takes_back_only_queued_prefetches(keep):
    link = GateLink()
    with make(link=link) as queue:
        prefetches = [queue.request(0, e, e, "prefetch") for e in range(5)]
        demand = queue.request(1, 0, 7, "demand")
        assert link.begun.acquire(timeout=30)  # of expert 0, or else of the demand
        queue.promote(prefetches[0])
        assert queue.cancel_prefetches(keep) == [(0, 2, 2), (0, 3, 3)]
        link.open()
        queue.wait([demand, *[prefetches[e] for e in (0, 1, 4)]])
        assert contents(queue) == [0, 1, 0, 0, 4, 0, 0, 100]
        with pytest.raises(RuntimeError, match="layer 0, expert 3: .* cancelled"):
            queue.wait([prefetches[3]])
        stats = queue.stats()
        assert stats.cancelled == 2 and stats.wasted_bytes == 0
        queue.wait([queue.request(2, 2, 2, "demand")])  # its slot is free again
        assert contents(queue)[2] == 202


def test_bytes_are_accounted_by_cause_and_waste():
    with make(slots=3) as queue:
        wait = lambda *request: queue.wait([queue.request(*request)])  # noqa: E731
        wait(0, 0, 0, "prefetch")
        wait(0, 1, 1, "prefetch")
        wait(0, 2, 2, "prefetch")
        queue.used(1)  # by key
        wait(1, 0, 0, "demand")  # over the unused one
        wait(1, 1, 1, "demand")  # over the used one
        wait(1, 2, 0, "demand")  # over a demanded one
        stats = queue.stats()
        assert (stats.demand.count, stats.demand.bytes) == (3, 3 * BLOCK)
        assert (stats.prefetch.count, stats.prefetch.bytes) == (3, 3 * BLOCK)
        assert stats.wasted_bytes == BLOCK and stats.unused_bytes == BLOCK
        assert stats.wait_s > 0 and stats.demand.seconds > 0


def test_events_carry_who_when_and_how_much():
    with make(link=EmulatedLink(BLOCK / 2e-3)) as queue:
        queue.store.subs = 2  # experts 2 and 3 are halves of expert 1
        queue.wait([queue.request(3, 3, 0, "demand", step=9)])
        (event,) = events_of(queue)
        assert (event.kind, event.cause, event.step) == ("transfer", "demand", 9)
        assert (event.layer, event.expert, event.sub, event.bytes) == (3, 1, 1, BLOCK)
        assert 2e-3 * (1 - 1e-6) <= event.dur_s and event.t_s >= 0
        stats = queue.stats().demand
        assert (stats.count, stats.bytes) == (1, event.bytes)
        assert stats.seconds == pytest.approx(event.dur_s)


@pytest.mark.parametrize("kind", KINDS)
def test_transfer_overlaps_with_the_main_thread(kind):
    link = GateLink()
    with make(kind, link=link) as queue:
        transfer = queue.request(0, 2, 1, "demand")
        assert link.begun.acquire(timeout=30)
        assert transfer.state == "running"  # and we are here, before it may end
        link.open()
        queue.wait([transfer])
        assert contents(queue)[1] == 2


def test_an_emulated_transfer_begins_when_it_is_asked_for():
    """Whenever its thread wakes: who works meanwhile waits for what is left alone."""
    with make(link=EmulatedLink(BLOCK / 20e-3)) as queue:
        transfer = queue.request(0, 0, 0, "demand")
        queue.wait([transfer])
        # Its time is the link's, or the copy's where that was held up.
        assert transfer.seconds >= 20e-3 * (1 - 1e-6)
        taken_s = queue.link.free_s - transfer.requested_s
        assert taken_s == pytest.approx(transfer.seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_equals_serial(kind):
    results = []
    for asynchronous in (True, False):
        rng = np.random.default_rng(1)
        with make(kind, asynchronous=asynchronous) as queue:
            for _ in range(60):
                slots = rng.permutation(8)[:4].tolist()
                causes = rng.choice(["demand", "prefetch"], 4).tolist()
                blocks = rng.integers(0, (LAYERS, EXPERTS), (4, 2)).tolist()
                requests = zip(blocks, slots, causes, strict=True)
                queue.wait([queue.request(*b, s, c) for b, s, c in requests])
                results.append(contents(queue))
    assert results[:60] == results[60:] and len({*map(tuple, results)}) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_exception_in_the_thread_surfaces(kind):
    with make(kind) as queue:
        # Together: a request after it is refused where the thread has come so far.
        bad, behind = queue.request_all([(0, EXPERTS, 0), (0, 0, 1)], "demand")
        with pytest.raises(KeyError, match="no expert 6"):
            queue.wait([behind])
        assert not bad.done and not behind.done
        with pytest.raises(KeyError):
            queue.poll()
        with pytest.raises(KeyError):
            queue.request(0, 1, 2, "demand")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_queue_goes_on_after_its_error(kind, asynchronous):
    with make(kind, asynchronous=asynchronous) as queue:
        queue.wait([queue.request(2, 3, 1, "prefetch")])
        with pytest.raises(KeyError, match="no expert 6"):
            queue.wait([queue.request(0, EXPERTS, 0, "demand")])
        if kind is DonatedSlots:
            queue.slots.array.delete()  # as by a program that failed
        queue.recover()
        # Also into the slots of what never came.
        queue.wait([queue.request(1, e, e, "demand") for e in range(3)])
        assert contents(queue)[:3] == [100, 101, 102]
        stats = queue.stats()
        assert stats.demand.count == 3 and stats.prefetch.count == 1
        assert stats.wasted_bytes == stats.unused_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_close_with_pending_requests_ends_the_thread(kind):
    link = GateLink()
    queue = make(kind, link=link)
    transfers = [queue.request(0, e, e, "demand") for e in range(6)]
    assert link.begun.acquire(timeout=30)
    (carrier,) = queue.carriers

    def open_once_closed():
        while not carrier._closed:
            time.sleep(1e-3)
        link.open()

    threading.Thread(target=open_once_closed).start()
    queue.close()
    thread = carrier.thread
    assert not thread.is_alive() and thread.daemon
    carried = queue.stats().demand.count  # as one, which was under way
    assert 1 <= carried <= queue.slots.max_staged
    # Rows of slots that are no memory of the host's are the engine's to write.
    in_slots = 1 if queue.slots.safe_in_thread else 0
    assert [each.done for each in transfers] == [n < in_slots for n in range(6)]
    with pytest.raises(RuntimeError, match="queue is closed"):
        queue.wait(transfers)
    with pytest.raises(RuntimeError, match="queue is closed"):
        queue.request(0, 0, 7, "demand")
    queue.close()  # twice is fine


def test_slot_with_a_queued_request_is_refused():
    link = GateLink()
    with make(link=link) as queue:
        queue.request(0, 0, 0, "demand")
        assert link.begun.acquire(timeout=30)
        queue.request(2, 1, 5, "prefetch")
        with pytest.raises(RuntimeError, match="slot 5 awaits layer 2, expert 1"):
            queue.request(0, 3, 5, "demand")
        link.open()


@pytest.mark.parametrize("slot", [-1, 8])
def test_rejects_slot_out_of_range(slot):
    with make() as queue, pytest.raises(IndexError, match=f"slot {slot}; there are 8"):
        queue.request(0, 0, slot, "demand")


def test_rejects_unknown_cause():
    with make() as queue, pytest.raises(ConfigError, match="transfer cause 'whim'"):
        queue.request(0, 0, 0, "whim")
