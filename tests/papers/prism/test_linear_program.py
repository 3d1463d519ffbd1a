"""The optimum of eq. 2 against a linear program."""

import numpy as np
import pytest

from moe_edge.papers.prism.studies.speed import linear_program
from moe_edge.place.optimal import best_cover
from tests.place.support import frequencies, unequal_slots
from tests.place.test_optimal import check_cover


@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.25, 2.0])
@pytest.mark.parametrize("servers", [2, 3, 7, 16])
@pytest.mark.parametrize("seed", range(2))
def test_best_cover_matches_the_linear_program(servers, ratio, seed):
    frequency_NLE = frequencies(servers, 5, 12, seed, shared=0.5 + 0.4 * seed)
    slots = unequal_slots(servers, 60, ratio, seed)
    capacity_N = np.minimum([s.sum() for s in slots], 60)
    value_NM = frequency_NLE.reshape(servers, -1)
    on_NM = best_cover(value_NM, capacity_N)
    check_cover(on_NM, capacity_N)
    bound = linear_program(value_NM, capacity_N)  # whole numbers reach it: integral
    assert value_NM[on_NM].sum() == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_best_cover_equal_and_zero_values_end_at_the_optimum(seed):
    """Ties everywhere: costs of 0 along whole rings of servers."""
    rng = np.random.default_rng(seed)
    value_NM = rng.integers(0, 3, (6, 40)).astype(float)
    capacity_N = np.array([10, 9, 8, 5, 5, 3])
    on_NM = best_cover(value_NM, capacity_N)
    check_cover(on_NM, capacity_N)
    bound = linear_program(value_NM, capacity_N)
    assert value_NM[on_NM].sum() == pytest.approx(bound)
    check_cover(best_cover(np.zeros((2, 4)), np.array([2, 2])), np.array([2, 2]))
