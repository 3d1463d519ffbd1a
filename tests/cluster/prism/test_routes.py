"""Routes around servers that do not reach each other: small cases, and their laws."""

import numpy as np
import pytest

from moe_edge.cluster.prism.routes import (
    copies_for,
    out_of_reach,
    reaches,
    routes_of,
)
from moe_edge.cluster.scheduler.requests import NobodyLeft

N, L, E = 4, 2, 3
ALL_N = np.ones(N, bool)
SLOTS_N = np.full(N, 7)
NOBODY_CALLS = np.zeros((N, L, E))


def held_by(*servers) -> np.ndarray:
    """bool [N, L, E]: every block, at these servers."""
    held_NLE = np.zeros((N, L, E), bool)
    held_NLE[list(servers)] = True
    return held_NLE


def test_another_holder_is_asked():
    routes = routes_of(held_by(1, 3), ALL_N, SLOTS_N, reaches(N, {(0, 1)}))
    assert (routes.target_NLE[0] == 3).all()
    assert (routes.target_NLE[2] == 3).all() and (routes.target_NLE[1] == 1).all()
    assert not routes.read_NLE.any()


def test_without_another_holder_a_server_reads_itself():
    routes = routes_of(held_by(1), ALL_N, SLOTS_N, reaches(N, {(0, 1)}))
    assert (routes.target_NLE[0] == 0).all() and routes.read_NLE[0].all()
    assert (routes.target_NLE[1:] == 1).all() and not routes.read_NLE[1:].any()


def test_for_a_server_without_slots_one_that_it_reaches_reads():
    slots_N = np.array([0, 7, 7, 7])
    routes = routes_of(held_by(1), ALL_N, slots_N, reaches(N, {(0, 1), (0, 2)}))
    assert (routes.target_NLE[0] == 3).all() and routes.read_NLE[3].all()
    assert (routes.target_NLE[3] == 3).all()  # it must know that it is asked
    assert (routes.target_NLE[2] == 1).all() and not routes.read_NLE[2].any()


def test_a_server_that_finds_nobody_ends_the_run_naming_them():
    slots_N, alive_N = np.array([0, 7, 0, 7]), np.array([True, True, True, False])
    with pytest.raises(
        NobodyLeft,
        match=r"server 0 has no slots and reaches none of the servers \[1\] that have "
        r"some \(block 0 of MoE layer 0 is on servers \[1\]\)",
    ):
        routes_of(held_by(1), alive_N, slots_N, reaches(N, {(0, 1)}))


def test_copies_go_to_the_server_that_lacks_them_first():
    calls_NLE = NOBODY_CALLS.copy()
    calls_NLE[0, 1, 2], calls_NLE[0, 0, 1] = 9, 5
    reach_NM = reaches(N, {(0, 1), (0, 3)})
    room_N = np.array([1, 6, 1, 6])
    copies = copies_for(held_by(1), ALL_N, room_N, calls_NLE, reach_NM)
    assert copies == [(0, 1, 2, 0), (2, 0, 1, 2)]  # no more room within its reach


def test_one_copy_serves_all_who_reach_it():
    reach_NM = reaches(N, {(0, 1), (2, 1)})
    room_N = np.array([6, 6, 6, 6])
    copies = copies_for(held_by(1), ALL_N, room_N, NOBODY_CALLS, reach_NM)
    assert len(copies) == L * E and {c.server for c in copies} == {0}


def test_laws_hold_for_random_tables_and_pairs():
    rng, ended, read, copied = np.random.default_rng(0), 0, 0, 0
    for _ in range(300):
        alive_N, slots_N = rng.random(N) < 0.9, rng.integers(0, 8, N)
        held_NLE = (rng.random((N, L, E)) < 0.3) & alive_N[:, None, None]
        held_NLE &= (slots_N > 0)[:, None, None]
        pairs = {(a, b) for a in range(N) for b in range(N) if a != b}
        bad = {pair for pair in sorted(pairs) if rng.random() < 0.3}
        reach_NM = reaches(N, bad)
        if not (alive_N & (slots_N > 0)).any():
            continue
        try:
            routes = routes_of(held_NLE, alive_N, slots_N, reach_NM)
        except NobodyLeft:
            ended += 1
            continue
        away_NLE = out_of_reach(held_NLE, alive_N, reach_NM)
        for n in np.flatnonzero(alive_N):
            for cell in np.ndindex(L, E):
                target = routes.target_NLE[n][cell]
                assert reach_NM[n, target] and alive_N[target]
                assert held_NLE[target][cell] or (
                    # It reads the block, and its own table says so.
                    routes.read_NLE[target][cell]
                    and routes.target_NLE[target][cell] == target
                    and slots_N[target] > 0
                )
                nobody = not held_NLE[(..., *cell)].any()
                if not (nobody or away_NLE[n][cell] or routes.read_NLE[n][cell]):
                    assert held_NLE[target][cell]
                read += not held_NLE[target][cell]
        room_N = np.maximum(slots_N - 1, held_NLE.sum(axis=(1, 2)))
        copies = copies_for(held_NLE, alive_N, room_N, NOBODY_CALLS, reach_NM)
        before = out_of_reach(held_NLE, alive_N, reach_NM).sum()
        for server, layer, block, _ in copies:
            assert not held_NLE[server, layer, block] and alive_N[server]
            held_NLE[server, layer, block] = True
        assert (held_NLE.sum(axis=(1, 2)) <= room_N).all()
        after = out_of_reach(held_NLE, alive_N, reach_NM).sum()
        assert after < before if copies else after == before
        copied += len(copies)
    assert min(ended, read, copied) > 5
