"""Bounds beside brute force on small cases."""

import itertools

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.memory.evict_pool import PoolBelady
from moe_edge.papers.coserve.memory.pool import Pool, fill
from moe_edge.papers.coserve.simulate.coe_bounds import belady_fcfs, distinct, uses
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest, board_requests
from tests.papers.coserve.support.experts import small_board, small_machine


def fewest_loads(chains, slots, start):
    """Over all orders of requests and all evictions: breadth first by loads."""
    seen, edge = set(), {(frozenset(start), tuple(chains))}
    for loads in itertools.count():
        closed = list(edge)
        while closed:  # what needs no load
            resident, left = state = closed.pop()
            if state in seen:
                continue
            seen.add(state)
            if not any(left):
                return loads
            for n, chain in enumerate(left):
                if chain and chain[0] in resident:
                    closed.append((resident, (*left[:n], chain[1:], *left[n + 1 :])))
        edge = {
            (kept | {chain[0]}, left)
            for resident, left in seen
            for chain in left
            if chain and chain[0] not in resident
            for kept in [resident, *(resident - {out} for out in resident)]
            if len(kept) < slots
        }


def fewest_in_order(order, slots, start):
    """Over all evictions."""
    states = {frozenset(start): 0}
    for expert in order:
        after: dict[frozenset, int] = {}
        for held, loads in states.items():
            options = [held]
            if expert not in held:
                loads += 1
                options = [held | {expert}]
                if len(held) == slots:
                    options = [held - {out} | {expert} for out in held]
            for option in options:
                after[option] = min(loads, after.get(option, 99))
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_distinct_is_never_beaten_and_reached_without_dependencies(seed):
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 4))
    start = rng.permutation(5)[:slots].tolist()
    single = [(int(e),) for e in rng.integers(0, 5, 5)]
    used = {e for chain in single for e in chain}
    assert fewest_loads(single, slots, start) == distinct(used, start)
    # Experts 3 and 4 follow some of the others.
    chains = [
        (e, 3 + e % 2) if e < 3 and rng.random() < 0.7 else (e,) for (e,) in single
    ]
    used = {e for chain in chains for e in chain}
    assert fewest_loads(chains, slots, start) >= distinct(used, start)


@pytest.mark.parametrize("seed", range(20))
def test_belady_is_the_best_eviction_of_an_order(seed):
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 4))
    order = rng.integers(0, 6, 14).tolist()
    start = rng.permutation(6)[: int(rng.integers(0, slots + 1))].tolist()
    assert belady_fcfs(order, slots, start, 6) == fewest_in_order(order, slots, start)


@pytest.mark.parametrize("seed", range(5))
def test_belady_in_a_pool_loads_as_often_as_the_bound(seed):
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 20, 200).tolist()
    pool = Pool(6, PoolBelady(order), [1] * 20, [0.1] * 20)
    fill([pool], rng.random(20))
    start, loads = set(pool.resident), 0
    for time, expert in enumerate(order):
        if expert not in pool:
            pool.enter(expert)
            loads += 1
        pool.touch(expert, time)
    assert loads == belady_fcfs(order, 6, start, 20)


def test_bounds_of_a_policy_are_of_its_own_executors_and_start():
    graph, memory = small_board(4), {"gpu": 60, "cpu": 80}
    requests = board_requests(graph, 60, 0.001, seed=4)
    machine = small_machine(memory_bytes=memory)
    case, used = CoeCase(graph, requests, machine), uses(graph, requests)
    share_E, found = graph.probability_E(), {}
    for name in ("samba", "samba_no_tier", "coserve", "affinity"):
        found[name] = case.bounds(name)
        setup = make_setup(name, graph, machine, share_E)
        assert found[name]["least_switches"] == len(set(used) - setup.start)
        run = case.run(name)
        assert run.switches >= found[name]["least_switches"]
        assert run.time_s >= found[name]["least_time_s"]
    # Loads of 1 s take longer than all else here, but those from the tier do not.
    for name in ("samba_no_tier", "coserve", "affinity"):
        assert found[name]["least_time_s"] == found[name]["least_switches"]
    assert found["samba"]["least_time_s"] < found["samba"]["least_switches"]
    assert found["coserve"] != found["affinity"]


def test_bounds_of_a_run_are_of_what_was_judged():
    graph = small_board(4)
    requests = board_requests(graph, 40, 0.001, seed=4)
    strange = CoeRequest("x", 100.0, "unknown", {"seed": 0, "defect": None})
    case = CoeCase(graph, [*requests, strange], small_machine())
    run = case.run("samba")
    assert set(run.failed) == {40}
    assert 0 < case.bounds("samba", run)["least_time_s"] <= run.time_s < 100
    # Of steps whose expert could not be loaded nothing is a switch.
    usual = case.belady_fcfs(run)
    run.steps = [step._replace(failed=True) for step in run.steps]
    assert case.belady_fcfs(run) == 0 < usual


def test_wrong_bounds_are_refused():
    with pytest.raises(ConfigError, match="slots must be a positive whole number, got"):
        belady_fcfs([0], 0, [], 1)
    with pytest.raises(
        ConfigError, match="uses are of experts 0 to 3, expected 0 to 1"
    ):
        belady_fcfs([0, 3], 1, [], 2)
