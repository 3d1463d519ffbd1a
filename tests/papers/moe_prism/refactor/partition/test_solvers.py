"""Solvers: laws, small optima, determinism, planted structure, refusals."""

import dataclasses

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from moe_edge.core.checks import ConfigError
from moe_edge.papers.moe_prism.refactor.partition import alternate, baselines
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    grouped_sums,
    objective,
    smallest,
)
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    build_problem,
    planted_activations,
)
from moe_edge.papers.moe_prism.refactor.partition.solve import SOLVERS
from tests.papers.moe_prism.support.partitions import slow_objective, solved, usage

SHORT = {"anneal": {"steps": 3000}, "anneal_numpy": {"steps": 3000}}


@pytest.fixture(scope="module")
def planted():
    return planted_activations(300, 64, clusters=4, active=1, background=0.1, seed=3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solver_holds_balance_and_seed(planted, solver):
    M_TF, _ = planted
    if solver == "brute_force":
        M_TF = M_TF[:, :8]
    options = SHORT.get(solver, {})
    first = solved(M_TF, 4, 2, solver, seed=5, **options)
    np.testing.assert_array_equal(first, solved(M_TF, 4, 2, solver, seed=5, **options))
    assert (np.bincount(first) == M_TF.shape[1] // 4).all()
    expected = pytest.approx(slow_objective(M_TF, first, 4, 2), rel=1e-5)
    assert objective(M_TF, first, 4, 2) == expected
    assert build_problem(M_TF, 4, 2).cost(first) == expected


def test_history_ends_with_the_cost_of_the_labels(planted):
    problem = build_problem(planted[0], 4, 2)
    labels, history = alternate.alternate(problem, seed=5)
    cost = history[-1][1] * problem.unit
    assert cost == pytest.approx(problem.cost(labels), rel=1e-5)


@pytest.mark.parametrize("tolerance", [alternate.TOLERANCE, alternate.ROUGH, 0.5])
def test_descent_ends_below_its_start_with_labels_of_its_cost(planted, tolerance):
    M_TF, _ = planted
    problem, rng = build_problem(M_TF, 4, 2), np.random.default_rng(0)
    starts_RF = alternate.random_partitions(rng, 6, M_TF.shape[1], 4)
    cost_R, labels_RF = alternate.descend(problem, starts_RF, tolerance=tolerance)
    for start_F, cost, labels_F in zip(starts_RF, cost_R, labels_RF, strict=True):
        assert cost * problem.unit == pytest.approx(problem.cost(labels_F), rel=1e-5)
        assert problem.cost(labels_F) < problem.cost(start_F)
    exact_R, _ = alternate.descend(problem, starts_RF)
    assert (cost_R >= exact_R * (1 - 1e-6)).all()


@pytest.mark.parametrize("shape", [(8, 2, 1), (9, 3, 1), (9, 3, 2), (12, 4, 3)])
def test_alternate_small_case_matches_brute_force(shape):
    neurons, subs, inactive = shape
    for seed in range(3):
        M_TF = np.random.default_rng(seed).standard_normal((20, neurons)) ** 3
        best, found = (
            objective(M_TF, solved(M_TF, subs, inactive, solver), subs, inactive)
            for solver in ("brute_force", "alternate")
        )
        assert found == pytest.approx(best, rel=1e-5)
        if neurons < 12:  # small enough for the search to find it every time
            problem = build_problem(M_TF, subs, inactive)
            labels, _ = alternate.search(problem, 0, 136)
            assert problem.cost(labels) == pytest.approx(best, rel=1e-5)


def test_brute_force_is_the_minimum_of_all_labelings():
    M_TF = np.random.default_rng(0).standard_normal((10, 6))
    found = objective(M_TF, solved(M_TF, 3, 2, "brute_force"), 3, 2)
    labelings = np.stack(np.meshgrid(*[range(3)] * 6), -1).reshape(-1, 6)
    balanced = [row for row in labelings if (np.bincount(row, minlength=3) == 2).all()]
    assert len(balanced) == 90 and baselines.num_partitions(6, 3) == 15
    assert found == pytest.approx(
        min(slow_objective(M_TF, row, 3, 2) for row in balanced), rel=1e-6
    )


@pytest.mark.parametrize("inactive", [1, 2, 3])
def test_descent_never_rises(planted, inactive):
    problem = build_problem(planted[0], 4, inactive)
    rng = np.random.default_rng(1)
    labels_RF = alternate.random_partitions(rng, 5, 64, 4)
    costs = [[problem.cost(row) for row in labels_RF]]
    for _ in range(8):
        norms = grouped_sums(problem.A_TF, labels_RF, 4)
        low = smallest(norms, inactive).astype(np.float32)
        labels_RF = alternate.reassign(low @ problem.A_TF, labels_RF)
        costs.append([problem.cost(row) for row in labels_RF])
    steps = np.diff(costs, axis=0)
    assert (steps <= 1e-5 * np.array(costs[0])).all() and steps[0].max() < 0
    cost_R, _ = alternate.descend(problem, labels_RF)
    assert (cost_R * problem.unit <= np.array(costs[-1]) * (1 + 1e-5)).all()


def test_reassign_two_subs_is_optimal_and_pairs_meet_once():
    rng = np.random.default_rng(0)
    scores = rng.random((2, 1, 10))
    labels = alternate.reassign(scores, np.arange(10)[None] % 2)
    gain = np.sort(scores[0, 0] - scores[1, 0])
    got = scores[labels[0], 0, np.arange(10)].sum()
    assert got == pytest.approx(scores[1].sum() + gain[:5].sum())
    for subs in (2, 3, 5, 8):
        rounds = alternate.disjoint_pairs(subs)
        met = [tuple(sorted(p)) for a, b in rounds for p in zip(a, b, strict=True)]
        assert sorted(met) == [(a, b) for a in range(subs) for b in range(a + 1, subs)]
        assert all(len({*a, *b}) == 2 * len(a) for a, b in rounds)


def test_alternate_beats_the_annealer(planted):
    M_TF, _ = planted
    for inactive in (2, 3):
        reference = solved(M_TF, 4, inactive, "anneal", steps=20_000)
        ours, annealed = (
            objective(M_TF, labels, 4, inactive)
            for labels in (solved(M_TF, 4, inactive), reference)
        )
        assert ours <= 1.005 * annealed


def test_normalise_finds_planted_structure_and_balanced_use():
    M_TF, cluster_F = planted_activations(
        400, 64, clusters=4, active=1, background=0.2, sigma=1.2, seed=0
    )
    labels = solved(M_TF, 4, 3, weights={"normalise": True})
    pairs = {*zip(cluster_F.tolist(), labels.tolist(), strict=True)}
    assert len(pairs) == 4  # every cluster is one sub-expert
    flat = M_TF / np.abs(M_TF).mean(0)
    np.testing.assert_allclose(usage(flat, labels, 4, 3), 0.25, atol=0.08)


def test_weights_change_what_is_solved(planted):
    M_TF, _ = planted
    weights_F = np.ones(64)
    weights_F[:16] = 100.0
    found = solved(M_TF, 4, 2, weights={"neuron_weights_F": weights_F})
    weighted_TF = M_TF * weights_F.astype(np.float32)
    np.testing.assert_array_equal(found, solved(weighted_TF, 4, 2))
    problem = build_problem(M_TF, 4, 2, neuron_weights_F=weights_F)
    expected = objective(weighted_TF, found, 4, 2)
    assert problem.cost(found) == pytest.approx(expected, rel=1e-4)
    weights_T = np.zeros(len(M_TF))
    weights_T[:40] = 1
    few = build_problem(M_TF, 4, 2, token_weights_T=weights_T)
    expected = objective(M_TF[:40], found, 4, 2)
    assert few.cost(found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_solve_any_scale_gives_finite_balanced_result(planted, scale):
    M_TF = planted[0].astype(np.float64)
    found = solved(M_TF * scale, 4, 2)
    assert (np.bincount(found) == 16).all()
    same = objective(M_TF, solved(M_TF, 4, 2), 4, 2)
    cost = objective(M_TF * scale, found, 4, 2)
    assert cost == pytest.approx(same * scale, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subs": 5}, r"12 neurons do not split into 5 .* are 1, 2, 3, 4, 6, 12$"),
        ({"subs": 1}, "sub_experts must be a whole number from 2, got 1"),
        ({"inactive": 0}, r"inactive is 0, expected 1\.\.3"),
        ({"inactive": 4}, r"inactive is 4, expected 1\.\.3"),
        ({"M_TF": np.full((3, 12), np.nan)}, "36 of 36 values that are NaN"),
        ({"M_TF": np.full((3, 12), np.inf)}, "NaN or infinite"),
        ({"M_TF": np.full((3, 12), 1e37, np.float32)}, "reach 1e.37; sums over 36"),
        ({"M_TF": np.full((3, 12), -1e308)}, "reach 1e.308; .* scale them down"),
        ({"M_TF": np.ones(12)}, r"shape \(12,\), expected two axes"),
        ({"M_TF": np.ones((0, 12))}, "empty: 0 tokens, 12 neurons"),
        ({"M_TF": np.ones((2, 12), complex)}, "complex128, expected real"),
        ({"solver": "magic"}, "unknown solver 'magic'; known: alternate"),
        ({"solver": "greedy", "restarts": 3}, "greedy has no option 'restarts'"),
        ({"restarts": 0}, "restarts must be a positive whole number, got 0"),
        (
            {"weights": {"neuron_weights_F": np.ones(5)}},
            r"neuron_weights_F has shape \(5,\)",
        ),
        (
            {"weights": {"token_weights_T": np.full(3, -1.0)}},
            "token_weights_T must be finite",
        ),
    ],
)
def test_solve_rejects_bad_input(change, message):
    arguments = {"M_TF": np.ones((3, 12)), "subs": 4, "inactive": 2} | change
    with pytest.raises(ConfigError, match=message):
        solved(**arguments)


def test_brute_force_rejects_large_case():
    problem = build_problem(np.ones((2, 64)), 4, 2)
    with pytest.raises(ConfigError, match="partitions of 64 neurons, at most 100000"):
        baselines.brute_force(problem)


def test_sampled_keeps_few_tokens_whole(planted):
    problem = build_problem(planted[0], 4, 2)
    rng = np.random.default_rng(0)
    assert len(alternate.sampled(problem, rng, 4).A_TF) == 128
    many = dataclasses.replace(problem, A_TF=np.tile(problem.A_TF, (8, 1)))
    sizes = [len(alternate.sampled(many, rng, ratio).A_TF) for ratio in (4, 8)]
    assert sizes == [600, 300]
    few = dataclasses.replace(problem, A_TF=problem.A_TF[:100])
    assert alternate.sampled(few, rng, 4) is few
    assert alternate.batch_sizes(50) == [8, 32, 10]


def test_one_blas_thread_nests_and_restores():
    def threads():
        return {
            lib["num_threads"] for lib in threadpool_info() if "blas" in lib["user_api"]
        }

    before = threads()
    with alternate.one_blas_thread(), alternate.one_blas_thread():
        assert threads() == {1}
    with pytest.raises(KeyError), alternate.one_blas_thread():
        raise KeyError
    assert threads() == before
