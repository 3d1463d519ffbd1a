import time

import pytest

from moe_edge.offload.carrier import Transfer
from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.residency import SlotPins


def make():
    # Slots 0 and 1 belong to layer 0, slot 2 to layer 1, slot 3 to any layer.
    return SlotPins(CacheSpec(2, 4, 2, (0, 0, 1, -1)))


def transfer(slot, state="queued"):
    return Transfer(0, 0, slot, 0, "demand", None, 0.0, time.perf_counter, state)


def test_guard_protects_what_moves_and_what_is_expected():
    pins = make()
    pins.begin(1, transfer(1))
    pins.expect(7, 2)
    assert pins.kept() == {1, 2} and pins.kept(expected=False) == {1}
    assert pins.kept([0, 3]) == {0, 1, 2, 3}
    pins.end(1)
    pins.end(1)  # twice is fine
    pins.forget(7)
    pins.forget(7)
    assert not pins.kept() and not pins.moving and not pins.expected


def test_guard_settles_what_has_arrived():
    pins = make()
    here, away = transfer(0, "done"), transfer(1, "running")
    pins.begin(0, here)
    pins.begin(1, away)
    assert pins.underway(0) is None and pins.underway(1) is away
    pins.settle()
    assert pins.moving == {1: away}
    assert pins.kept() == {1}


def test_guard_loses_an_expectation_with_its_slot():
    pins = make()
    pins.expect(1, 0)
    pins.expect(1, 0)
    pins.expect(2, 3)
    pins.give_up(3)
    pins.give_up(2)  # nothing was expected there
    assert pins.expected == {1: 0}
    pins.expect(5, 3)
    assert pins.expected == {1: 0, 5: 3}
    pins.expect(1, 3)  # the block stands elsewhere by now
    assert pins.expected == {1: 3}
    assert pins.kept() == {3}
    pins.forget_all()
    assert not pins.expected and not pins.kept()


@pytest.mark.parametrize(("layer", "count"), [(0, 2), (1, 2)])
def test_guard_counts_expected_blocks_where_a_layer_may_put_its_own(layer, count):
    pins = make()
    pins.expect(0, 0)
    pins.expect(4, 2)
    pins.expect(5, 3)
    assert pins.count_expected(layer) == count
