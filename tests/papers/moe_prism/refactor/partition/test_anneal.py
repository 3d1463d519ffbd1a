"""Annealing: its laws, its two forms, and the lean step of the NumPy one."""

import numpy as np
import pytest

from moe_edge.papers.moe_prism.refactor.partition import anneal, baselines
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    build_problem,
    planted_activations,
)


@pytest.fixture(scope="module")
def planted():
    return planted_activations(300, 64, clusters=4, active=1, background=0.1, seed=3)


@pytest.mark.parametrize("inactive", [1, 2, 3])
def test_annealers_incremental_cost_equals_recomputed(planted, inactive):
    """Every accepted step lowers what a full recompute says, and both paths agree."""
    problem = build_problem(planted[0], 4, inactive)
    # Cold from the start, so that the best labels are the last ones.
    cold = {"t0": 1e-6, "seed": 2}
    costs = [problem.cost(baselines.greedy(problem))]
    for steps in (20, 2000):
        jitted = anneal.anneal(problem, steps=steps, **cold)
        plain = anneal.anneal_numpy(problem, steps=steps, **cold)
        assert (jitted == plain).mean() > 0.9
        costs.append(problem.cost(jitted))
        assert problem.cost(plain) == pytest.approx(costs[-1], rel=2e-3)
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.9 * costs[0]


def test_anneal_smallest_sum_matches_sort():
    rows = np.random.default_rng(0).random((5, 40)).astype(np.float32)
    for count in (1, 2, 3, 4):
        found = anneal.smallest_sum(list(map(anneal.jnp.asarray, rows)), count)
        expected = np.sort(rows, axis=0)[:count].sum(0)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_anneal_hot_is_a_walk_and_scale_cools_it(planted):
    problem = build_problem(planted[0], 4, 2)
    greedy = problem.cost(baselines.greedy(problem))
    hot = anneal.anneal(problem, steps=2000, t0=1e9, cooling=1.0)
    cold = anneal.anneal(problem, steps=2000, t0=1e9, cooling=1.0, cost_scale=1e12)
    assert problem.cost(cold) < 0.9 * greedy
    assert problem.cost(cold) < 0.9 * problem.cost(hot)


@pytest.mark.parametrize("subs", [2, 3, 4, 5, 8])
def test_lowest_differs_from_the_sorted_sum_by_a_constant_of_a_swap(subs):
    """Every form of it: what a swap changes is what a full sort says."""
    rng = np.random.default_rng(subs)
    for inactive in range(1, subs):
        rows = rng.random((subs, 300))
        moved = rng.standard_normal(300)
        swapped = rows.copy()
        swapped[0] += moved
        swapped[1] -= moved

        def both(rows, inactive=inactive):
            exact = np.sort(rows, axis=0)[:inactive].sum(0)
            return exact, anneal._lowest(rows[0], rows[1], rows[2:], inactive)

        (before, low), (after, lower) = both(rows), both(swapped)
        np.testing.assert_allclose(lower - low, after - before, atol=1e-12)


def test_numpy_step_sorts_and_copies_nothing(planted, monkeypatch):
    """The peer of suite `refactor` must be no straw man."""
    problem = build_problem(planted[0], 4, 2)
    for inactive in (1, 2, 3):
        rows = [problem.A_TF[:, n] for n in range(4)]
        with monkeypatch.context() as patch:
            for name in ("sort", "partition", "stack"):
                patch.setattr(np, name, None)
            assert anneal._lowest(*rows[:2], rows[2:], inactive).shape == (300,)
