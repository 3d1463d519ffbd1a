"""Live runs on a board of tiny networks, looked at after every batch."""

from pathlib import Path

import jax
import numpy as np

from moe_edge.papers.coserve.coe.executor import Programs
from moe_edge.papers.coserve.coe.images import request_images
from moe_edge.papers.coserve.coe.live import Live
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.coe.store import ExpertStore, write_experts
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest
from tests.papers.coserve.support.coe_boards import drawn_requests, write_board
from tests.papers.coserve.support.experts import loads_by_group

MAX_BATCH, LOAD_S = 4, {"disk": 0.002, "host": 0.001}


def write_judging_board(folder: Path) -> tuple[CoeGraph, list[CoeRequest]]:
    """A board whose classifiers find some images damaged, and 60 requests."""
    graph = write_board(folder)
    requests = drawn_requests(graph, 60, 0.0005)
    programs, store = Programs(graph, jax.devices()[0]), ExpertStore(graph, folder)
    images = request_images(graph, requests[:4], folder)
    for expert in graph.follow:  # else fresh weights find all images damaged, or none
        network, record_B = programs.network(expert), store.record(expert)
        words = jax.device_put(network.words(record_B), programs.device)
        logits_NO = programs.outputs(expert, words, images)
        arrays = network.unpack(record_B)
        arrays["head.bias"] = arrays["head.bias"] - np.median(logits_NO, axis=0)
        write_experts(folder, {graph.experts[expert].file: network.pack(arrays)})
    return graph, requests


def machine_of(graph, executors, experts, max_batch=MAX_BATCH):
    """Pools of so many of the largest experts each."""
    of = graph.architectures
    costs = {
        name: ArchitectureCosts(1e-4, 1e-4, max_batch, 1, one.record_bytes, LOAD_S)
        for name, one in of.items()
    }
    each = experts * max(one.record_bytes for one in of.values()) + max_batch
    memory = {kind: count * each for kind, count in executors.items()}
    return Machine(dict.fromkeys(executors, costs), executors, memory)


class Watching:
    """An executor that is looked at after every batch, and its pool at every write."""

    def __init__(self, executor, pool, sizes, tier):
        self.executor, self.pool, self.sizes = executor, pool, sizes
        self.tier, self._write = tier, executor.slots.write
        executor.slots.write = self._written

    def _written(self, *given):
        self._write(*given)
        assert self.executor.slots.num_bytes <= self.pool.budget_bytes

    def run(self, batch, images):
        outcome = self.executor.run(batch, images)
        slots = self.executor.slots
        if outcome.judged is not None:  # of this lane nobody else changes anything
            assert set(slots.arrays) == self.pool.resident
            assert slots.num_bytes == self.sizes[list(slots.arrays)].sum()
        if self.tier is not None:  # of one lane alone
            held = self.executor._held
            assert set(held) == set(self.tier)
            size = sum(array.nbytes for array in held.values())
            assert size == self.tier.used_bytes <= self.tier.budget_bytes
        return outcome


class WatchedLive(Live):
    def executors(self, setup):
        made = zip(super().executors(setup), setup.pools, strict=True)
        sizes = self._graph.bytes_E
        self.watching = [Watching(*one, sizes, setup.tier) for one in made]
        self.loads = loads_by_group(setup)
        return self.watching


def live_of(folder, graph, requests, machine):
    store = ExpertStore(graph, folder)
    return WatchedLive(graph, store, machine, requests, folder, emulated=True)


def served(live, name, **more):
    setup = make_setup(
        *(name, live._graph, live._machine, live._graph.probability_E()), **more
    )
    return live.run(setup)
