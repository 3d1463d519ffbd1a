import pytest

from moe_edge.offload.guard import Guard
from moe_edge.offload.policy import CacheSpec
from moe_edge.offload.ticket import Ticket


def make():
    # Slots 0 and 1 belong to layer 0, slot 2 to layer 1, slot 3 to any layer.
    return Guard(CacheSpec(2, 4, 2, (0, 0, 1, -1)))


def ticket(slot, state="queued"):
    return Ticket(0, 0, slot, 0, "demand", None, 0.0, state)


def test_guard_protects_what_moves_and_what_is_expected():
    guard = make()
    guard.begin(1, ticket(1))
    guard.expect(7, 2)
    assert guard.protected().tolist() == [False, True, True, False]
    assert guard.protected(expected=False).tolist() == [False, True, False, False]
    assert guard.protected([0, 3]).tolist() == [True, True, True, True]
    guard.end(1)
    guard.end(1)  # twice is fine
    guard.forget(7)
    guard.forget(7)
    assert not guard.protected().any() and not guard.moving and not guard.expected


def test_guard_settles_what_has_arrived():
    guard = make()
    here, away = ticket(0, "done"), ticket(1, "running")
    guard.begin(0, here)
    guard.begin(1, away)
    assert guard.underway(0) is None and guard.underway(1) is away
    guard.settle()
    assert guard.moving == {1: away}
    assert guard.protected().tolist() == [False, True, False, False]


def test_guard_loses_an_expectation_with_its_slot():
    guard = make()
    guard.expect(1, 0)
    guard.expect(1, 0)
    guard.expect(2, 3)
    guard.give_up(3)
    guard.give_up(2)  # nothing was expected there
    assert guard.expected == {1: 0}
    guard.expect(5, 3)
    assert guard.expected == {1: 0, 5: 3}
    guard.expect(1, 3)  # the block stands elsewhere by now
    assert guard.expected == {1: 3}
    assert guard.protected().tolist() == [False, False, False, True]
    guard.forget_all()
    assert not guard.expected and not guard.protected().any()


@pytest.mark.parametrize(("layer", "count"), [(0, 2), (1, 2)])
def test_guard_counts_expected_blocks_where_a_layer_may_put_its_own(layer, count):
    guard = make()
    guard.expect(0, 0)
    guard.expect(4, 2)
    guard.expect(5, 3)
    assert guard.count_expected(layer) == count
