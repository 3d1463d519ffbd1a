"""Waves take every pair once, in order, and never more experts than fit."""

import numpy as np
import pytest

from moe_edge.engine.fused_waves import next_experts, next_pairs

E = 7
IDS_TK = np.array([[3, 1, 0], [1, 5, 3], [7, 7, 7], [6, 2, 1]], np.int32)


def waves_of(take):
    rest_TK, waves = IDS_TK, []
    while (rest_TK < E).any():
        now_TK = np.asarray(take(rest_TK))
        waves.append(now_TK)
        rest_TK = np.where(now_TK, E, rest_TK)
    return waves


@pytest.mark.parametrize(
    "capacity, sizes", [(1, [1] * 8 + [1]), (2, [2, 2, 2, 2, 1]), (4, [6, 3]), (7, [9])]
)
def test_next_pairs_are_the_longest_run_that_fits(capacity, sizes):
    waves = waves_of(lambda rest_TK: next_pairs(rest_TK, E, capacity))
    assert [int(now_TK.sum()) for now_TK in waves] == sizes
    order = np.concatenate([np.flatnonzero(now_TK) for now_TK in waves])
    np.testing.assert_array_equal(order, np.flatnonzero(IDS_TK < E))


@pytest.mark.parametrize(
    "capacity, experts",
    [(2, [{2, 5}, {0, 1}, {3, 6}]), (4, [{0, 1, 2, 5}, {3, 6}])],
)
def test_next_experts_takes_those_in_slots_first(capacity, experts):
    resident_E = np.isin(np.arange(E), [2, 4, 5])
    waves = waves_of(lambda rest_TK: next_experts(rest_TK, resident_E, capacity))
    assert [set(IDS_TK[now_TK].tolist()) for now_TK in waves] == experts
    assert sum(int(now_TK.sum()) for now_TK in waves) == (IDS_TK < E).sum()
