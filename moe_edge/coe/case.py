"""What a run of a collaboration of experts is about: board, requests, machine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_edge.coe.machine import Machine, parse_executors, parse_memory
from moe_edge.coe.presets import PRESETS, get_preset, record_bytes
from moe_edge.coe.profile import read_profile
from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.workload.coe_graph import CoeGraph, read_graph
from moe_edge.workload.coe_tasks import (
    DECAY,
    PERIOD_S,
    CoeRequest,
    read_requests,
    task_graph,
    task_requests,
)

REDUCED_PERIOD_S = PERIOD_S / 10
SAMPLE_SHARE = 0.1  # of the requests, where nothing says how often experts are used


@dataclasses.dataclass(frozen=True)
class CoeWork:
    """Who judges what.

    Attributes:
      graph: a `coe.json`; None: the board of `task`.
      requests: a `requests.jsonl`; None: those of `task`, by the graph's frequencies.
      task: of the paper: a1, a2 (352 types, 2,500 and 3,500 requests), b1, b2 (342).
      period_s: between two requests of a task; None: 4 ms, of machine `reduced` 0.4.
      decay: of the frequencies of a task's board, in types: p_i ~ exp(-i / decay).
    """

    graph: str | None = None
    requests: str | None = None
    task: str = "a1"
    period_s: float | None = None
    decay: float = DECAY

    def __post_init__(self):
        if self.period_s is not None:
            check_positive("period_s", self.period_s)

    @property
    def name(self) -> str:
        """Of the task, or of the file of requests."""
        return self.task if self.requests is None else Path(self.requests).stem

    def build(self, machine: str, seed: int) -> tuple[CoeGraph, list[CoeRequest]]:
        """Reads or draws both.

        Args:
          machine: for which; its name says how large the networks of a board are.
        """
        if self.graph is None:
            sizes = record_bytes(machine)
            graph = task_graph(self.task, seed, self.decay, sizes)
        else:
            graph = read_graph(self.graph)
        if self.requests is not None:
            return graph, read_requests(self.requests)
        usual_s = REDUCED_PERIOD_S if machine == "reduced" else PERIOD_S
        period_s = usual_s if self.period_s is None else self.period_s
        return graph, task_requests(self.task, graph, period_s, seed)


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """On what.

    Attributes:
      simulate: a preset (numa, uma, reduced) or a `coe_profile.json`.
      executors: number of each kind such as gpu:2,cpu:1; the first kind is the fast
        one. None: the preset's.
      memory: of each of these kinds such as 9.5GB,13GB; None: the preset's.
      parallel_loads: loads from the disk do not wait for each other.
    """

    simulate: str
    executors: str | None = None
    memory: str | None = None
    parallel_loads: bool = False

    def build(self) -> Machine:
        """The machine; ConfigError: something is missing or wrong."""
        executors = self.executors and parse_executors(self.executors)
        if self.simulate in PRESETS:
            machine = get_preset(self.simulate)
            executors = executors or machine.executors
            memory = machine.memory_bytes
        elif executors and self.memory:
            devices = read_profile(self.simulate)
            machine, memory = None, {}
        else:
            known = ", ".join(PRESETS)
            raise ConfigError(
                f"--simulate {self.simulate} is none of {known}; of a coe_profile.json "
                "say --executors and --memory too"
            )
        if self.memory:
            memory = parse_memory(self.memory, executors)
        changes = {
            "executors": executors,
            "memory_bytes": memory,
            "one_disk": not self.parallel_loads,
        }
        if machine is None:
            return Machine(devices, **changes, source=self.simulate)
        return dataclasses.replace(machine, **changes)


def probability_E(graph: CoeGraph, requests: Sequence[CoeRequest]) -> Sequence[float]:
    """Uses of each expert a request: as the graph says, else by the first requests."""
    count = max(round(SAMPLE_SHARE * len(requests)), 1)
    return graph.probability_E([request.component for request in requests[:count]])
