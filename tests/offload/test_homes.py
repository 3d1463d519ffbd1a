"""Who lives where, slots of several homes in one cache, one queue over their links."""

import jax
import numpy as np
import pytest

from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.homes import Homes, homes_by_counts, homes_in_turn
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.real_carrier import CallerCarrier
from moe_edge.offload.residency import Residency
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.slots import AliasedSlots, DonatedSlots
from moe_edge.offload.thread_carrier import ThreadCarrier
from moe_edge.offload.transfer_queue import TransferQueue

E, SIZE = 6, 16
TURNS = Homes(homes_in_turn(2, E, 3), (2, 2, 2))
COPY_S = 20e-3  # of a block over an emulated link


class Store:
    num_experts, subs, block_bytes = E, 1, 4 * SIZE

    def num_bytes(self, layer, expert):
        return self.block_bytes

    def record(self, layer, expert):
        return np.full(SIZE, 10 * layer + expert, np.float32)

    source = record


def cache_of(homes=TURNS) -> SlotCache:
    spec = CacheSpec(2, E, 2, (-1,) * sum(homes.slots_N))
    return SlotCache(spec, get_eviction("lru"), homes)


def queue_of(
    kind=CallerCarrier, slots=AliasedSlots, homes=TURNS, serial=False, **link
) -> TransferQueue:
    devices = jax.local_devices()[: len(homes)]
    sizes = zip(homes.slots_N, devices, strict=True)
    parts = [slots(count, SIZE, np.float32, device) for count, device in sizes]
    all_slots = HomeSlots(parts, devices)
    made = [EmulatedLink(4 * SIZE / COPY_S) if link else None for _ in devices]
    options = {"serial": True} if serial else {}
    carriers = [
        kind(Store(), all_slots.part(n), made[n], **options) for n in range(len(homes))
    ]
    return TransferQueue(carriers, all_slots, homes.home_S)


def test_experts_take_homes_in_turn_or_by_how_often_they_are_used():
    np.testing.assert_array_equal(
        homes_in_turn(2, 5, 3), [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]]
    )
    counts_LE = np.array([[9, 5, 4, 0, 0], [0, 0, 0, 0, 0], [8, 1, 1, 1, 1]])
    by_counts_LE = homes_by_counts(counts_LE, 2)
    # 9 against 5 + 4; a layer that nobody used is shared out; three experts at most.
    np.testing.assert_array_equal(by_counts_LE[0], [0, 1, 1, 0, 0])
    np.testing.assert_array_equal(by_counts_LE[1], [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(by_counts_LE[2], [0, 1, 1, 1, 0])


def test_blocks_enter_slots_of_their_home_only_and_evict_there():
    cache = cache_of()
    for layer, expert in [(0, 0), (0, 3), (1, 2), (0, 1), (1, 5)]:
        cache.look_up(layer, np.array([[expert]]), None, step=0)
        slot = cache.admit(layer, expert)
        assert TURNS.home_S[slot] == TURNS.home_LE[layer, expert]
    # Home 0 held layer 0's experts 0 and 3; two of layer 1 have pushed them out.
    assert cache.slot_LE[0].tolist() == [-1, 2, -1, -1, -1, -1]
    assert cache.admit(0, 0, kept={0, 1}) is None  # other homes have room
    assert cache.rooms(1) == [2, 2, 2] and cache.room_L == [6, 6]
    assert cache.fits(0, [0, 3, 1, 4]) and not cache.fits(0, [0, 1, 2, 3, 6 % E, 0])
    assert cache.surely_fits(0, E)
    assert not cache_of(Homes(TURNS.home_LE, (1, 2, 2))).surely_fits(0, 2)


@pytest.mark.parametrize("policy", ["lru", "moe_infinity", "smoe_score"])
def test_free_blocks_go_where_the_fewest_have_gone(policy):
    """Also by policies with a `victim` of their own; the least worth leaves there."""
    free = Homes(None, (2, 3, 4))
    cache = SlotCache(CacheSpec(1, 20, 2, (-1,) * 9), get_eviction(policy), free)
    rng = np.random.default_rng(0)
    for step in range(20):
        experts = rng.choice(20, rng.integers(1, 10), replace=False)[None]
        scores_TE = rng.random((1, 20), np.float32)
        found = cache.look_up(0, experts.astype(np.int32), scores_TE, step)
        assert cache.fits(0, experts[0].tolist())
        held_N = np.bincount(free.home_S[cache.slot_LE[0][found.hits]], minlength=3)
        slots = [cache.admit(0, expert) for expert in found.misses]
        assert None not in slots
        entered_N = np.bincount(free.home_S[slots], minlength=3)
        # No home gets a second one before all others got one, or were full.
        is_full_N = held_N + entered_N == free.slots_N
        assert entered_N.max() <= entered_N[~is_full_N].min(initial=99) + 1
    assert not cache.fits(0, [*range(10)]) and cache.rooms(0) == [9]


@pytest.mark.parametrize("policy", ["lru", "lfu", "moe_infinity"])
def test_a_home_evicts_as_a_cache_of_its_own_would(policy):
    """One cache of three homes against three caches that each see their experts."""
    rng, step = np.random.default_rng(0), 0
    home_E = TURNS.home_LE[0]
    one = SlotCache(
        CacheSpec(1, E, 2, (-1,) * 3),
        get_eviction(policy),
        Homes(TURNS.home_LE[:1], (1, 1, 1)),
    )
    alone = [
        SlotCache(CacheSpec(1, E, 2, (-1,)), get_eviction(policy)) for _ in range(3)
    ]
    for step in range(30):
        expert = int(rng.integers(E))
        home = home_E[expert]
        for cache in (one, alone[home]):
            for miss in cache.look_up(0, np.array([[expert]]), None, step).misses:
                cache.admit(0, miss)
        want_E = np.any([cache.resident(0) for cache in alone], axis=0)
        np.testing.assert_array_equal(one.resident(0), want_E)


@pytest.mark.parametrize(
    "kind, slots", [(CallerCarrier, AliasedSlots), (ThreadCarrier, DonatedSlots)]
)
def test_homes_load_at_once_each_over_its_own_link(kind, slots):
    queue = queue_of(kind, slots, emulated=True)
    cache = cache_of()
    residency = Residency(cache, queue)
    try:
        experts = [0, 3, 1, 2]  # two of home 0, one of homes 1 and 2
        cache.look_up(0, np.array([experts]), None, step=0)
        for each in queue.carriers:  # compiles what copies
            each.slots.write(each.slots.num_slots - 1, np.zeros(SIZE, np.float32))
        transfers = residency.demand(0, experts, step=0)
        queue.wait(transfers)
        begun_s = transfers[0].requested_s
        # Until each link is free again: its own copies, however long they were held
        # up, and nobody else's.
        taken_s = [each.link.free_s - begun_s for each in queue.carriers]
        assert (np.array(taken_s) / COPY_S >= [1.99, 0.99, 0.99]).all()
        busy_s = [each.totals["demand"].seconds for each in queue.carriers]
        assert taken_s == pytest.approx(busy_s)
        assert all(transfer.done for transfer in transfers)
        arrays = [np.asarray(array) for array in queue.slots.array]
        devices = [array.devices() for array in queue.slots.array]
        assert devices == [{device} for device in queue.slots.devices]
        for expert in experts:
            home, slot = TURNS.home_LE[0, expert], cache.slot_LE[0, expert]
            assert (arrays[home][slot - TURNS.first_N[home]] == expert).all()
        stats = queue.stats()
        assert stats.demand.count == 4 and stats.demand.bytes == 4 * 4 * SIZE
        assert [each["bytes"] for each in queue.report()] == [128, 64, 64]
        assert stats.wait_s == pytest.approx(sum(e["wait_s"] for e in queue.report()))
    finally:
        queue.close()


def test_prefetches_are_taken_back_promoted_and_forgotten_at_every_home():
    queue = queue_of(emulated=True)
    first = queue.request_all([(0, 0, 0), (0, 1, 2)], "demand")
    ahead = queue.request_all([(1, 5, 1), (1, 0, 3), (1, 1, 4)], "prefetch")
    assert [transfer.slot for transfer in ahead] == [1, 3, 4]
    queue.promote(ahead[0])
    assert ahead[0].cause == "demand"
    # The third went over an idle link at once.
    assert queue.cancel_prefetches() == [(1, 0, 3)]
    queue.wait([*first, ahead[0], ahead[2]])
    queue.used(ahead[2].key)
    assert queue.stats().unused_bytes == 0 and queue.stats().cancelled == 1
    queue.reset_stats()
    assert queue.stats().demand.count == 0
    queue.recover()
    queue.wait(queue.request_all([(0, 0, 0)], "demand"))
    queue.close()


def test_serial_requests_go_on_after_one_of_another_home_failed():
    queue = queue_of(serial=True)
    queue.carriers[0]._source = lambda layer, expert: 1 / 0
    with pytest.raises(ZeroDivisionError):
        queue.request_all([(0, 0, 0), (0, 1, 2)], "demand")
    queue.carriers[0]._source = Store().record
    transfers = queue.request_all([(0, 0, 0), (0, 4, 2)], "demand")
    assert all(transfer.done for transfer in transfers)
    assert queue.stats().demand.count == 2
