"""Servers that ask nobody: tokens, moved bytes, requests passed on, losses."""

import numpy as np
import pytest

from moe_edge.cluster.prism.outcome import alone_row
from tests.support.live_cluster import (
    LiveCluster,
    assert_tokens_of_one_machine,
    requests,
)

SLOTS = [5, 9, 25]
LENGTHS, NEW = (9, 4, 17, 6, 9), 8
SIZES = [(length, NEW) for length in LENGTHS]


def at_server(home: int, servers: int):
    """All requests of one server, at once."""
    asked = requests(LENGTHS, NEW, servers)
    for one in asked:
        one.home = home
    return asked


@pytest.fixture(scope="module")
def cluster():
    with LiveCluster(SLOTS) as cluster:
        cluster.scheduler.tell_all(
            "warm", {"alone": None}, {"sizes": np.array(SIZES, np.int32)}
        )
        cluster.scheduler.wait_for_all("warm", 60.0)
        yield cluster


def test_each_loads_what_its_slots_lack(cluster):
    run = cluster.scheduler.run_alone(requests(LENGTHS, NEW, 3), passes_on=False)
    assert_tokens_of_one_machine(run.asked)
    assert [one.at for one in run.asked] == [one.home for one in run.asked]
    row = alone_row(run, 3)
    assert row["redirected"] == row["remote_calls"] == 0 and row["local_ratio"] == 1.0
    missed = [run.notes[n][0]["misses"] for n in range(3)]
    moved = [run.notes[n][0]["host_bytes"] for n in range(3)]
    record = cluster.servers[0].server.holdings.blocks.block_bytes
    for misses, size in zip(missed, moved, strict=True):
        assert misses > 0 and size >= misses * record and size % record == 0
    hits = sum(run.notes[n][0]["hits"] for n in range(3))
    assert row["hit_ratio"] == hits / (hits + sum(missed)) < 1
    assert [run.notes[n][0]["compiled"] for n in range(3)] == [0, 0, 0]
    # Nothing was asked of others, and the next method may ask again.
    assert not cluster.traffic(sent=True)
    held_NLE = np.arange(3)[:, None, None] == np.full((1, 2, 12), 2)
    placed = cluster.run(held_NLE, requests(LENGTHS, NEW, 3))
    assert_tokens_of_one_machine(placed.asked)
    assert placed.notes[0][0]["rows"] > 0 and "misses" not in placed.notes[0][0]


def test_a_busy_server_passes_requests_on_to_idle_ones(cluster):
    run = cluster.scheduler.run_alone(at_server(0, 3), passes_on=True)
    assert_tokens_of_one_machine(run.asked)
    # The first stays, the next two find idle servers, the others find none.
    assert [one.at for one in run.asked] == [0, 1, 2, 0, 0]
    assert alone_row(run, 3)["redirected"] == 2


def test_requests_of_a_lost_server_go_to_the_next():
    with LiveCluster([25, 25]) as cluster:
        sizes = {"sizes": np.array([(9, NEW)], np.int32)}
        cluster.scheduler.tell_all("warm", {"alone": 1e9}, sizes)
        cluster.scheduler.wait_for_all("warm", 60.0)
        asked = requests(LENGTHS, NEW, 2)
        cluster.kill_after(1, 3)
        run = cluster.scheduler.run_alone(asked, passes_on=False)
        assert_tokens_of_one_machine(run.asked)
        (failure,) = run.failures
        assert failure.server == 1
        assert any(one.home == 1 and one.at == 0 for one in run.asked)
