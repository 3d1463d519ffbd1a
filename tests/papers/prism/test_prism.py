"""Prism's algorithms 1 and 2, and the traps of their printed form."""

import numpy as np
import pytest

from moe_edge.papers.prism.prism import (
    Prism,
    allocate_counts,
    assign_blocks,
    layer_entropy,
    rebalance_counts,
)
from tests.place.support import frequencies, unequal_slots


def check_counts(count_NL, capacity_N, experts):
    assert (count_NL.sum(axis=1) == capacity_N).all()  # no slot is lost
    assert (count_NL.sum(axis=0) >= experts).all()
    assert ((count_NL >= 0) & (count_NL <= experts)).all()


def test_layer_entropy_is_in_bits():
    frequency_NLE = np.array([[[1, 1, 1, 1], [2, 2, 0, 0], [5, 0, 0, 0]]], float)
    np.testing.assert_allclose(layer_entropy(frequency_NLE), [[2.0, 1.0, 0.0]])


def test_allocate_counts_follows_entropy():
    """Entropies 2, 1, 1 bits; 8 slots and 4 more on the other server."""
    rows = [[1, 1, 1, 1], [2, 2, 0, 0], [0, 2, 2, 0]]
    frequency_NLE = np.array([rows, rows], float)
    count_NL = allocate_counts(frequency_NLE, np.array([8, 8]))
    assert count_NL.tolist() == [[4, 2, 2], [4, 2, 2]]


def test_allocate_counts_remainders_are_handed_out():
    """Thirds of ten: the floor alone would lose a slot."""
    frequency_NLE = np.ones((1, 3, 8))
    assert allocate_counts(frequency_NLE, np.array([24])).tolist() == [[8, 8, 8]]
    two = allocate_counts(np.ones((2, 3, 5)), np.array([10, 10]))
    check_counts(two, np.array([10, 10]), 5)


def test_allocate_counts_without_entropy_shares_equally():
    frequency_NLE = np.zeros((2, 3, 4))
    frequency_NLE[:, :, 1] = 1
    count_NL = allocate_counts(frequency_NLE, np.array([6, 6]))
    assert count_NL.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_allocate_counts_layer_without_entropy_takes_what_others_cannot():
    frequency_NLE = np.ones((1, 2, 4))
    frequency_NLE[0, 1] = [1, 0, 0, 0]
    assert allocate_counts(frequency_NLE, np.array([8])).tolist() == [[4, 4]]


def test_allocate_counts_never_more_than_a_layer_has():
    frequency_NLE = np.ones((2, 4, 8))
    frequency_NLE[:, 1:, 1:] *= 1e-6  # nearly all entropy is in layer 0
    capacity_N = np.array([20, 20])
    count_NL = allocate_counts(frequency_NLE, capacity_N)
    check_counts(count_NL, capacity_N, 8)
    assert (count_NL[:, 0] == 8).all()


def test_rebalance_counts_server_without_a_slot_in_the_fullest_layer_gives_another():
    """The printed loop never ends here: server 0 has nothing in layer 0."""
    count_NL = np.array([[0, 4, 0], [4, 0, 1]])
    count_NL = np.vstack([count_NL, [[2, 1, 0]]])
    capacity_N = count_NL.sum(axis=1)
    rebalance_counts(count_NL, capacity_N, 4)
    check_counts(count_NL, capacity_N, 4)


def test_rebalance_counts_layers_at_their_minimum_give_nothing():
    count_NL = np.array([[4, 4, 3], [0, 0, 1]])
    rebalance_counts(count_NL, np.array([11, 1]), 4)
    assert count_NL.tolist() == [[4, 4, 3], [0, 0, 1]]


@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.5])
@pytest.mark.parametrize("seed", range(8))
def test_allocate_counts_ends_and_covers_on_tight_unequal_memory(seed, ratio):
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(2, 17))
    frequency_NLE = frequencies(servers, 6, 12, seed, skew=rng.uniform(0.5, 3))
    frequency_NLE[frequency_NLE < 0.02] = 0
    slots = unequal_slots(servers, 72, ratio, seed)
    capacity_N = np.minimum([s.sum() for s in slots], 72)
    if capacity_N.sum() >= 72:
        check_counts(allocate_counts(frequency_NLE, capacity_N), capacity_N, 12)


def test_assign_blocks_favourites_then_the_fewest_duplicates_give():
    """Both want blocks 0 and 1; the server with fewer duplicates moves first."""
    frequency_NLE = np.array([[[9, 5, 3, 1]], [[9, 5, 1, 2]]], float)
    on_NLE = assign_blocks(frequency_NLE, np.array([[2], [2]]))
    assert on_NLE[0, 0].tolist() == [True, False, True, False]
    assert on_NLE[1, 0].tolist() == [False, True, False, True]
    assert on_NLE.any(axis=0).all()
    assert on_NLE.sum(axis=2).tolist() == [[2], [2]]


def test_assign_blocks_server_without_duplicates_is_skipped():
    frequency_NLE = np.array([[[9, 1, 1, 1]], [[1, 9, 8, 1]], [[1, 9, 8, 1]]], float)
    on_NLE = assign_blocks(frequency_NLE, np.array([[1], [2], [2]]))
    assert on_NLE[0, 0].tolist() == [True, False, False, False]
    assert on_NLE.any(axis=0).all()


def test_prism_uses_all_memory_and_covers():
    frequency_NLE = frequencies(3, 5, 16)
    slots = [np.array([20]), np.array([30]), np.array([25, 25])]
    placement = Prism().place(frequency_NLE, slots)
    assert placement.memory_use(slots) == 1.0
    assert placement.coverage == 1.0
