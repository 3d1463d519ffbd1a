"""Our placer: against brute force, against the optimum of eq. 2, and its options."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.specs import Link
from moe_edge.papers.prism.latency_aware import LatencyAware, block_values, propose
from moe_edge.place.latency_model import LatencyModel
from moe_edge.place.migrate import arrivals
from moe_edge.place.optimal import objective
from moe_edge.place.placer import get_placer
from moe_edge.place.problem import Problem, Traffic
from tests.place.support import all_choices, cost_model, frequencies, unequal_slots

SLOW = Link(bytes_per_s=1e5, latency_s=1e-3, source="test")
LINKS = {(n, m): SLOW for n in range(3) for m in range(3) if n != m and 2 in (n, m)}


def problem(seed=0, ratio=1.5, shape=(3, 6, 16), current=None, top_k=4, **traffic):
    frequency_NLE = frequencies(*shape, seed)
    slots = unequal_slots(shape[0], shape[1] * shape[2], ratio, seed)
    traffic = Traffic(top_k, **traffic)
    costs = cost_model(links=LINKS)
    return Problem(frequency_NLE, slots, costs, current, traffic=traffic)


@pytest.mark.parametrize("seed", range(4))
def test_latency_is_never_predicted_worse_than_the_optimum_of_eq_2(seed):
    ratio = 1.0 + 0.25 * seed
    case = problem(seed, ratio, requests_per_s=0.05)
    model, ours = LatencyModel.of(case), LatencyAware().solve(case)
    best = get_placer("optimal").solve(case)
    assert model.seconds(ours.on_NLE) <= model.seconds(best.on_NLE)
    assert objective(case.frequency_NLE, ours.on_NLE) >= objective(
        case.frequency_NLE, best.on_NLE
    )


@pytest.mark.slow
def test_more_calls_stay_at_home_where_the_prediction_hardly_tells():
    home, predicted_s = {}, {}
    for locality in (0.0, 0.4):
        placer = LatencyAware(locality=locality)
        home[locality], predicted_s[locality] = [], []
        for seed in range(6):
            case = problem(seed, requests_per_s=0.05)
            on_NLE = placer.solve(case).on_NLE
            away = objective(case.frequency_NLE, on_NLE) / case.frequency_NLE.sum()
            home[locality].append(1 - away)
            predicted_s[locality].append(LatencyModel.of(case).seconds(on_NLE))
    assert np.mean(home[0.4]) > np.mean(home[0.0])
    assert np.mean(predicted_s[0.4]) < 1.1 * np.mean(predicted_s[0.0])


def test_latency_wins_clearly_behind_a_slow_line():
    """Equal memory, half as much again as the model."""
    case = Problem(
        frequencies(3, 6, 16, shared=0.6),
        (np.array([48]),) * 3,
        cost_model(links=LINKS),
        traffic=Traffic(4),
    )
    model, ours = LatencyModel.of(case), LatencyAware().solve(case)
    best = get_placer("optimal").solve(case)
    assert model.seconds(ours.on_NLE) < 0.85 * model.seconds(best.on_NLE)


@pytest.mark.parametrize("seed", range(4))
def test_latency_is_close_to_the_best_of_all_placements(seed):
    shape, slots = (3, 1, 5), (np.array([2]), np.array([3]), np.array([2]))
    traffic = Traffic(2, prompt_tokens=10, output_tokens=5)
    costs = cost_model(links=LINKS)
    case = Problem(frequencies(*shape, seed), slots, costs, traffic=traffic)
    model, ours = LatencyModel.of(case), LatencyAware().solve(case)
    best_s = min(
        model.seconds(on_NM.reshape(shape)) for on_NM in all_choices((2, 3, 2), 5)
    )
    assert model.seconds(ours.on_NLE) <= 1.05 * best_s


def test_latency_short_horizon_stays_and_long_horizon_moves():
    current = get_placer("prism").solve(problem())

    def moved(horizon):
        placer = LatencyAware(horizon_requests=horizon)
        new = placer.solve(problem(current=current))
        return len(arrivals(current, new))

    assert moved(1e-12) == 0
    assert moved(1e9) > 0


def test_latency_moves_only_blocks_new_to_their_server():
    slots = (np.array([30, 30]), np.array([50]), np.array([20, 30]))
    model = cost_model(gpus=((1.0, 1.0), (1.0,), (1.0, 1.0)), links=LINKS)
    frequency_NLE = frequencies(3, 6, 16)
    current = get_placer("redundance").place(frequency_NLE, slots)
    new = LatencyAware().place(frequency_NLE, slots, model, current=current)
    assert len(arrivals(current, new)) == (new.on_NLE & ~current.on_NLE).sum()


def test_block_values_new_copy_serves_others_once():
    case = problem(ratio=1.6)
    model = LatencyModel.of(case)
    on_NLE = get_placer("optimal").solve(case).on_NLE
    own_NLE, others_NLE = model.marginals(on_NLE)
    value_NLE = block_values(model, on_NLE)
    shared_LE = ((value_NLE != own_NLE) & ~on_NLE & (others_NLE != 0)).sum(axis=0)
    assert shared_LE.max() <= 1
    assert shared_LE.any()


def test_propose_covers_with_every_slot():
    value_NLE = frequencies(3, 2, 8, shared=1.0)
    on_NLE = propose(value_NLE, np.array([6, 7, 8]))
    assert on_NLE.any(axis=0).all()
    assert on_NLE.sum(axis=(1, 2)).tolist() == [6, 7, 8]


def test_latency_bad_options_are_refused():
    for kind, options, message in (
        (Traffic, {"top_k": 0}, "top_k must be a positive whole number"),
        (Traffic, {"prompt_tokens": (5.0, 0.0)}, "prompt_tokens must be positive, got"),
        (Traffic, {"requests_per_s": -1.0}, "requests_per_s must be positive"),
        (LatencyAware, {"steps": -1}, "steps must be"),
        (LatencyAware, {"locality": -0.5}, "locality must be 0"),
        (LatencyAware, {"horizon_requests": -1.0}, "horizon_requests must be 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            kind(**options)


def test_latency_problems_it_cannot_predict_are_refused():
    case = problem()
    with pytest.raises(ConfigError, match="latency needs a cost model; name a cluster"):
        LatencyAware().place(case.frequency_NLE, case.slots)
    with pytest.raises(ConfigError, match="tokens has 2 numbers for 3 servers"):
        LatencyAware().solve(problem(prompt_tokens=(5.0, 6.0)))
    with pytest.raises(ConfigError, match="requests_per_s has 2 numbers for 3 servers"):
        LatencyAware().solve(problem(requests_per_s=[0.1, 0.2]))
