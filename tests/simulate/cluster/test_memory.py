"""Memory while blocks move, on full GPUs."""

import dataclasses

import numpy as np
import pytest

from moe_edge.place.migrate import Decision
from moe_edge.place.migration_policy import MigrationPolicy
from moe_edge.place.placer import Placer
from moe_edge.place.plan import Placement
from moe_edge.simulate.cluster.migration import Migration
from moe_edge.simulate.cluster.pools import RoutingPools
from tests.support.tiny_cluster import asked, run, tiny_costs

L, E, SLOTS = 3, 10, 12  # three GPUs on two servers, 30 blocks in 36 slots


def full(rng, gpus=(1, 2)):
    """A random placement that covers every block and fills every GPU."""
    gpu_NX = np.full((len(gpus), L * E), -1)
    order, start = rng.permutation(L * E), 0
    for n, count in enumerate(gpus):
        room = min(count * SLOTS, L * E)
        share = order[start : start + room]
        start += room
        left = np.setdiff1d(order, share)
        share = np.concatenate([share, rng.permutation(left)[: room - len(share)]])
        gpu_NX[n, share] = np.arange(room) % count
    return Placement(gpu_NX.reshape(-1, L, E))


@dataclasses.dataclass(frozen=True)
class Restless(Placer):
    """Another random placement each time."""

    name = "restless"
    SOURCE = "test"
    rng: np.random.Generator

    def assign(self, problem):
        return full(self.rng)


@pytest.fixture
def most_G(monkeypatch):
    """Counts for itself what is on the GPUs, whenever a copy begins."""
    most_G, load = [], Migration._load

    def watched(self, time_s, gpu):
        load(self, time_s, gpu)
        held_NX = self.table.gpu_NX
        held_G = np.bincount(held_NX[held_NX >= 0], minlength=3)
        held_G[list(self._loading)] += 1
        most_G.append(held_G.max())

    monkeypatch.setattr(Migration, "_load", watched)
    return most_G


@pytest.mark.parametrize("source", ["host", "network"])
@pytest.mark.parametrize("seed", range(3))
def test_no_gpu_holds_more_than_one_block_too_many(seed, source, monkeypatch, most_G):
    monkeypatch.setattr(
        "moe_edge.place.migration_policy.decide",
        lambda *args: Decision(True, 2.0, 1.0, 0.5, 1),
    )
    rng = np.random.default_rng(seed)
    ids_TLK = np.array([[rng.permutation(E)[:2] for _ in range(L)] for _ in range(20)])
    pools = RoutingPools({"a": ids_TLK}, E)
    requests = asked((0, 0.0, 1, 60, "a"), (1, 0.0, 1, 60, "a"))
    policy = MigrationPolicy(20.0, placer=Restless(rng), source=source, chunk_bytes=256)
    costs = tiny_costs((1, 2), SLOTS)
    loop, result = run(requests, full(rng), costs, pools, migration=policy)
    done = [m for m in loop.migration.migrations if m.done_s is not None]
    assert len(done) > 1
    assert max(most_G) <= SLOTS + 1
    assert result.facts["peak_memory"] == max(SLOTS, *most_G) / SLOTS
    assert (loop.table.gpu_NX >= 0).sum() == loop.migration.placement.on_NLE.sum()
