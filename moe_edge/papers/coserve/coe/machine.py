"""Executors, memory and disk of a machine that serves a collaboration of experts."""

import dataclasses
from collections.abc import Mapping

from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_count,
    check_known,
)
from moe_edge.offload.budget import UNITS, parse_budget
from moe_edge.papers.coserve.coe.profile import (
    ArchitectureCosts,
    Devices,
    largest_bucket,
)
from moe_edge.papers.coserve.memory.coserve_memory import pool_bytes
from moe_edge.papers.coserve.schedule.coserve import ExpertCosts
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph

MOST_EXECUTORS = 1000  # each is a thread


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is; the first kind of executor is the fast one.

    Attributes:
      devices: costs of each kind; executors: how many of it; memory_bytes: of it.
      unified: all kinds share one memory, so one executor alone may have all of it,
        and there is no tier below it.
      one_disk: loads from it wait for each other.
      source: of the costs.
    """

    devices: Devices
    executors: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    unified: bool = False
    one_disk: bool = True
    source: str = "measured"

    def __post_init__(self):
        if not self.executors or set(self.executors) != set(self.memory_bytes):
            raise ConfigError(
                f"executors of {', '.join(self.executors) or 'no kind'}, memory of "
                f"{', '.join(self.memory_bytes) or 'no kind'}; expected the same kinds"
            )
        for kind, count in self.executors.items():
            check_known("kind of executor", kind, self.devices)
            check_count(f"executors of {kind}", count)
            check_count(f"memory of {kind}", self.memory_bytes[kind])
        if (executors := sum(self.executors.values())) > MOST_EXECUTORS:
            raise ConfigError(
                f"executors are {executors} in all, expected at most {MOST_EXECUTORS}"
            )

    @property
    def kinds(self) -> list[str]:
        """Of each executor."""
        return [kind for kind, n in self.executors.items() for _ in range(n)]

    @property
    def first(self) -> str:
        """The fast kind."""
        return next(iter(self.executors))

    def pool_bytes(self, kind: str, graph: CoeGraph, executors: int) -> int:
        """Of the pool of each of so many executors that share the kind's memory."""
        memory = self.memory_bytes[kind]
        return pool_bytes(
            kind, memory, executors, self.batch_bytes(kind, graph), _least(graph)
        )

    def alone_bytes(self, graph: CoeGraph) -> tuple[int, int]:
        """Pool of one executor of the first kind, and tier below it (0: none)."""
        batch = self.batch_bytes(self.first, graph)
        rest = [kind for kind in self.executors if kind != self.first]
        if self.unified:
            memory = sum(self.memory_bytes.values())
            return pool_bytes(self.first, memory, 1, batch, _least(graph)), 0
        counts = {kind: self.executors[kind] for kind in rest}
        tier = sum(n * self.pool_bytes(k, graph, n) for k, n in counts.items())
        memory = self.memory_bytes[self.first]
        return pool_bytes(self.first, memory, 1, batch, _least(graph)), tier

    def batch_bytes(self, kind: str, graph: CoeGraph) -> int:
        """Of the largest batch of an executor of that kind."""
        used = self._used(kind, graph)
        return max(one.batch_bytes for one in used)

    def fitted(self, graph: CoeGraph, alone: bool = False) -> "Machine":
        """The machine with batches that leave room: each pool holds the smallest
        expert, and one of them the largest. Who has that room keeps its batches.

        Args:
          alone: one executor of the first kind serves, else all do.
        Raises:
          CapacityError: batches of one image leave too little; says which memory of
            each kind would do.
        """
        largest, machine, each = int(graph.bytes_E.max()), self, {}
        counts, memory = dict(self.executors), dict(self.memory_bytes)
        if alone:
            counts[self.first] = 1
        if alone and self.unified:
            counts, memory = {self.first: 1}, {self.first: sum(memory.values())}
        for kind, count in counts.items():
            image, least = self._image_bytes(kind, graph), _least(graph)
            pool_bytes(kind, memory[kind], count, image, least)  # or it is refused
            each[kind] = memory[kind] // count
            machine = machine.with_batches(kind, graph, each[kind] - least)
        serving = [self.first] if alone else list(counts)
        pools = {k: each[k] - machine.batch_bytes(k, graph) for k in serving}
        if largest <= max(pools.values()):
            return machine
        for kind in sorted(pools, key=pools.get, reverse=True):
            found = machine.with_batches(kind, graph, each[kind] - largest)
            if found is not None:
                return found
        enough = [
            f"{counts[kind] * (self._image_bytes(kind, graph) + largest)} bytes of "
            + ("all kinds together" if alone and self.unified else kind)
            for kind in pools
        ]
        raise CapacityError(
            f"the largest expert has {largest} bytes, the largest pool "
            f"{max(pools.values())}; with batches of one image that takes a memory of "
            f"{' or '.join(enough)}, or fewer executors"
        )

    def with_batches(
        self, kind: str, graph: CoeGraph, most_bytes: int
    ) -> "Machine | None":
        """The machine with batches of a kind that need at most so many bytes each.

        None: not even batches of one image do.
        """
        if self.batch_bytes(kind, graph) <= most_bytes:
            return self
        if self._image_bytes(kind, graph) > most_bytes:
            return None
        costs = {}
        for name, one in self.devices[kind].items():
            images = max(most_bytes // max(one.item_bytes, 1), 1)
            most = min(one.max_batch, largest_bucket(images))
            costs[name] = dataclasses.replace(one, max_batch=most)
        return dataclasses.replace(self, devices={**self.devices, kind: costs})

    def costs(self, kind: str, graph: CoeGraph) -> ExpertCosts:
        """Of every expert on an executor of that kind."""
        each = [self._of(kind, expert.architecture) for expert in graph.experts]
        return ExpertCosts(
            [one.k_s for one in each],
            [one.b_s for one in each],
            [one.load_s["disk"] for one in each],
            [one.max_batch for one in each],
        )

    def host_load_s(self, kind: str, graph: CoeGraph) -> list[float]:
        """Seconds of a load of every expert from host memory."""
        return [self._of(kind, e.architecture).load_s["host"] for e in graph.experts]

    def _of(self, kind: str, architecture: str) -> ArchitectureCosts:
        check_known(f"architecture on {kind}", architecture, self.devices[kind])
        return self.devices[kind][architecture]

    def _image_bytes(self, kind: str, graph: CoeGraph) -> int:
        """Of its smallest one: a single image."""
        return max(one.item_bytes for one in self._used(kind, graph))

    def _used(self, kind: str, graph: CoeGraph) -> list[ArchitectureCosts]:
        names = sorted({expert.architecture for expert in graph.experts})
        return [self._of(kind, name) for name in names]


def parse_executors(text: str) -> dict[str, int]:
    """Kind -> number, from `gpu:2,cpu:1`; ConfigError: another form."""
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, _, count = part.strip().partition(":")
        number = count.isascii() and count.isdigit() and len(count) < 19
        if not kind or kind in found or not number:
            raise ConfigError(f"executors is {text!r}, expected such as gpu:2,cpu:1")
        found[kind] = int(count)
    return found


def parse_memory(text: str, executors: Mapping[str, int]) -> dict[str, int]:
    """Kind -> bytes, from `9.5GB,13GB` in the order of the executors' kinds.

    Raises:
      ConfigError: another number of amounts, or something else.
    """
    amounts = [part.strip() for part in text.split(",")]
    if len(amounts) != len(executors):
        raise ConfigError(
            f"memory {text!r} names {len(amounts)} amounts, expected "
            f"{len(executors)}: {', '.join(executors)}"
        )
    found = {}
    for kind, amount in zip(executors, amounts, strict=True):
        try:
            found[kind] = parse_budget(amount).bytes
        except ConfigError:
            found[kind] = None
        if found[kind] is None:
            raise ConfigError(
                f"memory of {kind} is {amount!r}, expected an amount such as 9.5GB in "
                f"{', '.join(UNITS)}"
            )
    return found


def _least(graph: CoeGraph) -> int:
    return int(graph.bytes_E.min())
