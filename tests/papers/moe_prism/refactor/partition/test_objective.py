"""The objective against a token-by-token reference, ranks, and the order of blocks."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    objective,
    order_by_mass,
    smallest,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import planted_activations
from tests.papers.moe_prism.support.partitions import slow_objective, solved, usage


@pytest.fixture(scope="module")
def planted():
    return planted_activations(300, 64, clusters=4, active=1, background=0.1, seed=3)


@pytest.mark.parametrize("inactive", [1, 2, 3])
def test_objective_matches_reference(planted, inactive):
    M_TF, _ = planted
    labels = np.random.default_rng(0).permutation(64) % 4
    expected = slow_objective(M_TF, labels, 4, inactive)
    assert objective(M_TF, labels, 4, inactive) == pytest.approx(expected, rel=1e-5)
    exact = objective(M_TF.astype(np.float64), labels, 4, inactive)
    assert exact == pytest.approx(expected, rel=1e-12)


def test_objective_float16_sums_do_not_overflow():
    M_TF = np.full((2, 8), 60000, np.float16)
    assert objective(M_TF, np.arange(8) % 2, 2, 1) == pytest.approx(2 * 4 * 60000, 1e-3)


def test_smallest_ties_go_by_index():
    norms = np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    assert smallest(norms, 2).T.tolist() == [[True, False, True], [True, True, False]]


def test_order_by_importance_largest_first_same_partition():
    M_TF = np.array([[1.0, -9.0, 2.0, 4.0]])
    assert order_by_mass(np.abs(M_TF).sum(0), [0, 1, 0, 1], 2).tolist() == [1, 0, 1, 0]
    with pytest.raises(ConfigError, match="no partition of 4 neurons into 2"):
        order_by_mass(np.abs(M_TF).sum(0), [0, 1, 1, 1], 2)


def test_objective_is_degenerate_without_structure():
    """jax_facts 6: a sort by magnitude scores as well as any search."""
    M_TF, _ = planted_activations(512, 64, clusters=1, active=1, sigma=1.0)
    sort = solved(M_TF, 4, 2, "magnitude")
    expected = pytest.approx(objective(M_TF, sort, 4, 2), rel=0.01)
    for solver, options in (("alternate", {}), ("anneal", {"steps": 20_000})):
        labels = solved(M_TF, 4, 2, solver, **options)
        assert objective(M_TF, labels, 4, 2) == expected
    assert usage(M_TF, sort, 4, 2).round(1).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("subs", [128, 129, 256, 300])
def test_smallest_ranks_more_than_128_sub_experts(subs):
    norms_UT = np.random.default_rng(0).random((subs, 20))
    for inactive in (1, subs // 2, subs - 1):
        low_UT = smallest(norms_UT, inactive)
        assert (low_UT.sum(0) == inactive).all()
        highest = np.where(low_UT, norms_UT, 0).max(0)
        assert (highest < np.where(low_UT, 1, norms_UT).min(0)).all()
