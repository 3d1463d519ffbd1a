"""A collaboration of experts on this machine: weights, programs, links and images.

Where there is no accelerator, every kind of executor computes on the processor, and
loads last as long as the costs say: a seek and a rate from each tier. One disk serves
all executors in turn, unless loads are parallel.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from moe_edge.core.checks import CheckpointError
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import say
from moe_edge.offload.link import EmulatedLink, SharedLink, TransferLink, Turns
from moe_edge.papers.coserve.coe.engine import ExpertEngine
from moe_edge.papers.coserve.coe.executor import Executor, Held, Programs, memory_for
from moe_edge.papers.coserve.coe.images import request_images
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.profiler import ProfileSizes, device_of, profile_graph
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.coe.store import ExpertStore
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest

_FAST = 1e15  # bytes a second: a load takes as long whatever its size


def has_accelerator() -> bool:
    return jax.default_backend() != "cpu"


class Live:
    """Requests and executors of this machine, for one policy after another.

    Args:
      graph: of the experts; store: of their weights, checked.
      machine: its costs decide; emulated: loads last what they say.
      requests: all; folder: to which paths of their images are relative.

    Attributes:
      programs: of each kind of executor.
      images: of each request, or why there is none.
    """

    def __init__(
        self,
        graph: CoeGraph,
        store: ExpertStore,
        machine: Machine,
        requests: Sequence[CoeRequest],
        folder: Path,
        emulated: bool,
    ):
        keep_heap()  # else freeing a batch's arrays gives pages back, again and again
        self._graph, self._store, self._machine = graph, store, machine
        self._requests, self._emulated = requests, emulated
        devices = {kind: device_of(kind) for kind in machine.executors}
        each = {device: Programs(graph, device) for device in devices.values()}
        self.programs = {kind: each[device] for kind, device in devices.items()}
        for kind, programs in self.programs.items():
            costs = machine.devices[kind]
            programs.warm_up(store, {n: one.max_batch for n, one in costs.items()})
        self.images = request_images(graph, requests, folder)

    def run(self, setup: Setup) -> CoeRun:
        """Serves all requests by one policy; Raises: whatever a thread died of."""
        engine = ExpertEngine(self._graph, setup, self.executors(setup), self.images)
        return engine.run(self._requests)

    def executors(self, setup: Setup) -> list[Executor]:
        """Of each lane, filled as its pool is at the start.

        An expert that cannot be read any more is in no pool and no tier then: when it
        is to be loaded, its requests fail.
        """
        held: Held | None = None
        if setup.tier is not None:
            programs, held = self.programs[setup.kinds[0]], {}
            network = programs.network
            with memory_for("the tier in host memory", programs.device):
                for e in [*setup.tier]:
                    try:
                        held[e] = np.array(network(e).words(self._store.record(e)))
                    except CheckpointError as error:
                        say(f"not in the tier at the start: {error}")
                        setup.tier.take(e)
        disk, made = Turns(), []
        for kind, pool in zip(setup.kinds, setup.pools, strict=True):
            turns = disk if self._machine.one_disk else Turns()
            links = self._links(kind, turns)
            executor = Executor(
                self.programs[kind], self._store, links, held, cold=not self._emulated
            )
            for lost in executor.fill([*pool.resident]):
                pool.leave(lost)
            made.append(executor)
        return made

    def _links(
        self, kind: str, disk: Turns
    ) -> Mapping[str, Mapping[str, TransferLink]]:
        """From each tier to a pool of that kind, of each architecture."""
        links: dict[str, dict[str, TransferLink]] = {"disk": {}, "host": {}}
        for name, costs in self._machine.devices[kind].items():
            for tier, of in links.items():
                of[name] = TransferLink()
                if self._emulated:
                    of[name] = EmulatedLink(_FAST, costs.load_s[tier])
            links["disk"][name] = SharedLink(links["disk"][name], disk)
        return links


def with_measured_costs(
    machine: Machine, graph: CoeGraph, store: ExpertStore, loads_too: bool
) -> Machine:
    """The machine with K and B, perhaps loads, as they are here in a short profile.

    Batches and the memory of their images stay as they are, and so do the pools.
    """
    each = [one for costs in machine.devices.values() for one in costs.values()]
    sizes = ProfileSizes(most_batch=max(one.max_batch for one in each), repeats=5)
    devices = {kind: device_of(kind) for kind in machine.executors}
    once = {device: kind for kind, device in devices.items()}
    found = profile_graph(graph, store, {k: d for d, k in once.items()}, sizes)
    fields = ("k_s", "b_s", "r2", "load_s") if loads_too else ("k_s", "b_s", "r2")
    costs = {
        kind: {
            name: dataclasses.replace(
                machine.devices[kind][name], **{f: getattr(one, f) for f in fields}
            )
            for name, one in found[once[device]].items()
        }
        for kind, device in devices.items()
    }
    return dataclasses.replace(machine, devices=costs, source="measured at the start")
