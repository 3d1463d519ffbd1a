"""What a run of a collaboration of experts is about: board, requests, machine."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from moe_edge.core.checks import ConfigError, check_known, check_positive
from moe_edge.papers.coserve.coe.machine import Machine, parse_executors, parse_memory
from moe_edge.papers.coserve.coe.presets import PRESETS, get_preset, record_bytes
from moe_edge.papers.coserve.coe.profile import Devices, read_profile
from moe_edge.papers.coserve.coe.trial import with_executors
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph, read_graph
from moe_edge.papers.coserve.workload.coe_tasks import (
    DECAY,
    PERIOD_S,
    TASKS,
    CoeRequest,
    read_requests,
    task_graph,
    task_requests,
)

# Trained by moe-edge train_board; see its README.md. Both files are called `demo`.
DEMO_BOARD = Path(__file__).resolve().parents[1] / "demo_board"
REDUCED_PERIOD_S = PERIOD_S / 10
MAX_WAIT_S = 30.0  # of affinity, unless another one is given
SAMPLE_SHARE = 0.1  # of the requests, where nothing says how often experts are used


@dataclasses.dataclass(frozen=True)
class CoeWork:
    """Who judges what.

    Attributes:
      graph: a `coe.json`, or `demo`: a board of 24 types that comes with this program;
        None: the board of `task`; live with random weights, whose verdicts mean
        nothing.
      requests: a `requests.jsonl`, or `demo`: some of that board; None: those of
        `task`, by the graph's frequencies.
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
        check_known("task", self.task, TASKS)
        if self.period_s is not None:
            check_positive("period_s", self.period_s)

    @property
    def name(self) -> str:
        """Of the task, or of the file of requests."""
        return self.task if self.requests is None else Path(self.requests).stem

    @property
    def graph_path(self) -> Path | None:
        """Of the graph, if it is a file."""
        if self.graph is None:
            return None
        demo = self.graph == "demo"
        return DEMO_BOARD / "coe.json" if demo else Path(self.graph)

    @property
    def requests_path(self) -> Path | None:
        """Of the requests, if they are a file."""
        if self.requests is None:
            return None
        demo = self.requests == "demo"
        return DEMO_BOARD / "requests.jsonl" if demo else Path(self.requests)

    def build(self, machine: str, seed: int) -> tuple[CoeGraph, list[CoeRequest]]:
        """Reads or draws both.

        Args:
          machine: for which; its name says how large the networks of a board are.
        """
        if self.graph is None:
            sizes = record_bytes(machine)
            graph = task_graph(self.task, seed, self.decay, sizes)
        else:
            graph = read_graph(self.graph_path)
        if self.requests is not None:
            return graph, read_requests(self.requests_path)
        usual_s = REDUCED_PERIOD_S if machine == "reduced" else PERIOD_S
        period_s = usual_s if self.period_s is None else self.period_s
        return graph, task_requests(self.task, graph, period_s, seed)


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """On what.

    Attributes:
      simulate: computed time, on a preset (numa, uma, reduced) or by the costs of a
        `coe_profile.json`; None: live, on this machine.
      profile: of a live run: costs, from a `coe_profile.json`; or a preset, whose loads
        are emulated, while K and B are measured. None: `reduced`, where there is a GPU
        with loads as they are.
      executors: number of each kind such as gpu:2,cpu:1; the first kind is the fast
        one. None: the preset's.
      memory: of each of these kinds such as 9.5GB,13GB; None: the preset's, which a
        machine of one memory shares evenly among its executors.
      parallel_loads: loads from the disk do not wait for each other.
    """

    simulate: str | None = None
    profile: str | None = None
    executors: str | None = None
    memory: str | None = None
    parallel_loads: bool = False

    def __post_init__(self):
        if self.simulate is not None and self.profile is not None:
            raise ConfigError(
                f"--simulate {self.simulate} and --profile {self.profile}: costs come "
                "from one of them; give one"
            )

    @property
    def live(self) -> bool:
        return self.simulate is None

    @property
    def costs(self) -> str:
        """Whose they are: a preset's name or a file."""
        return self.simulate or self.profile or "reduced"

    def build(self, graph: CoeGraph) -> Machine:
        """The machine; ConfigError: something is missing or wrong."""
        executors = self.executors and parse_executors(self.executors)
        disk = {"one_disk": not self.parallel_loads}
        if self.costs in PRESETS:
            machine = dataclasses.replace(get_preset(self.costs, graph), **disk)
            if not self.memory:
                return with_executors(machine, executors) if executors else machine
            executors = executors or machine.executors
            memory = parse_memory(self.memory, executors)
            return dataclasses.replace(
                machine, executors=executors, memory_bytes=memory
            )
        if executors and self.memory:
            memory = parse_memory(self.memory, executors)
            devices = read_profile(self.costs)
            _check_profiled(self.costs, devices, executors, graph)
            return Machine(devices, executors, memory, **disk, source=self.costs)
        known = ", ".join(PRESETS)
        flag = "profile" if self.live else "simulate"
        raise ConfigError(
            f"--{flag} {self.costs} is none of {known}; of a coe_profile.json "
            "say --executors and --memory too"
        )


def _check_profiled(
    path: str, devices: Devices, kinds: Iterable[str], graph: CoeGraph
) -> None:
    """Raises ConfigError for costs of networks of another size."""
    for kind in kinds:
        for name, costs in devices.get(kind, {}).items():
            known = graph.architectures.get(name)
            if known is not None and known.record_bytes != costs.record_bytes:
                raise ConfigError(
                    f"{path} is of {name!r} with {costs.record_bytes} bytes an expert, "
                    f"the graph has {known.record_bytes}; profile the graph again"
                )


def probability_E(graph: CoeGraph, requests: Sequence[CoeRequest]) -> Sequence[float]:
    """Uses of each expert a request: as the graph says, else by the first requests of
    components that have a rule."""
    known = [one.component for one in requests if one.component in graph.rules]
    return graph.probability_E(known[: max(round(SAMPLE_SHARE * len(known)), 1)])
