"""The optimum of eq. 2: against brute force and every heuristic."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.place.greedy import Greedy, cover_greedily, favourites
from moe_edge.place.optimal import Optimal, best_cover, objective
from moe_edge.place.placer import PLACERS, get_placer
from moe_edge.place.problem import Problem
from moe_edge.place.run_place import compare, place_all
from tests.place.support import (
    all_choices,
    cost_model,
    frequencies,
    unequal_slots,
)


def check_cover(on_NM, capacity_N):
    assert on_NM.any(axis=0).all()
    assert (on_NM.sum(axis=1) == capacity_N).all()


@pytest.mark.parametrize("capacity_N", [(2, 3), (3, 2), (4, 4), (1, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_best_cover_matches_brute_force(capacity_N, seed):
    value_NM = np.random.default_rng(seed).random((len(capacity_N), 5))
    capacity_N = np.array(capacity_N)
    on_NM = best_cover(value_NM, capacity_N)
    check_cover(on_NM, capacity_N)
    best = max((value_NM[c]).sum() for c in all_choices(capacity_N, 5))
    assert value_NM[on_NM].sum() == pytest.approx(best, rel=1e-12)


def test_best_cover_chain_over_three_servers_is_found():
    """Item 3 fits best on server 0, whose item goes to 1, whose item goes to 2."""
    value_NM = np.array(
        [
            [1.0, 0.0, 0.0, 9.0, 0.0],
            [0.9, 1.0, 0.0, 0.0, 0.0],
            [0.0, 0.9, 5.0, 0.0, 5.0],
        ]
    )
    on_NM = best_cover(value_NM, np.array([1, 1, 3]))
    assert on_NM.tolist() == [
        [False, False, False, True, False],
        [True, False, False, False, False],
        [False, True, True, False, True],
    ]


def test_optimal_is_never_worse_than_any_placer():
    model = cost_model(gpus=((1.0,), (1.0,), (2.0, 2.0)))
    for seed in range(4):
        frequency_NLE = frequencies(3, 4, 16, seed)
        slots = unequal_slots(3, 64, 1.1 + 0.2 * seed, seed, gpus=(1, 1, 2))
        best = Optimal().place(frequency_NLE, slots)
        least = objective(frequency_NLE, best.on_NLE)
        for name in PLACERS:
            if name != "eplb":  # equal servers only
                placement = get_placer(name).place(frequency_NLE, slots, model)
                assert objective(frequency_NLE, placement.on_NLE) >= least - 1e-12


def test_favourites_first_of_equals():
    on_NM = favourites(np.array([[1.0, 2.0, 2.0, 1.0]]), np.array([3]))
    assert on_NM.tolist() == [[True, True, True, False]]


def test_cover_greedily_drops_the_cheapest_copy():
    value_NM = np.array([[9.0, 8.0, 0.0], [9.0, 2.0, 1.0]])
    on_NM = favourites(value_NM, np.array([2, 2]))
    cover_greedily(value_NM, on_NM)
    assert on_NM.tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("seed", range(5))
def test_cover_greedily_covers_tight_unequal_memory(seed):
    frequency_NLE = frequencies(9, 5, 12, seed)
    slots = unequal_slots(9, 60, 1.0, seed)
    placement = Greedy().place(frequency_NLE, slots)
    assert placement.coverage == 1.0


@pytest.mark.parametrize("name", ["optimal", "latency"])
def test_more_servers_than_whole_numbers_hold_chains_of_are_refused(name):
    """Prism's placement, which is then advised, has no gap to compare with."""
    servers = 513
    model = cost_model(gpus=((1.0,),) * servers)
    slots = [np.array([1])] * servers
    problem = Problem(np.ones((servers, 1, 2)), slots, model)
    with pytest.raises(ConfigError, match=f"{name} .*512 servers, got 513; use prism"):
        get_placer(name).solve(problem)
    row = compare(place_all(problem, {"prism": get_placer("prism")}), problem)["prism"]
    assert row["gap_pct"] is None and row["coverage"] == 1.0
    Optimal().place(np.ones((512, 1, 2)), slots[:512])
