"""The same requests for many experts under one policy after another, live on this
machine or in computed time, and the bounds that no policy can beat."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.coe.case import CoeWork, MachineOptions, probability_E
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.presets import PRESETS
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.coe.setup import Setup, make_setup
from moe_edge.papers.coserve.coe.trial import TrialOptions, chosen_machine, sample_of
from moe_edge.papers.coserve.simulate import coe_bounds
from moe_edge.papers.coserve.simulate.coe import CoeSimulator
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest

Serve = Callable[[Setup], CoeRun]
EMULATED = "loads last as long as the costs say"
COLD = "loads from disk: files that the system was asked to forget before"
CACHED = (
    "loads from disk: files that this system cannot be asked to forget, so they may "
    "come from its cache"
)


class CoeCase:
    """The same requests on the same machine for every policy.

    Attributes:
      graph, requests, machine: what it is about.
      serve: runs a policy's setup; None: in computed time.
      live: makes a `serve` for a machine and requests; None: as above.
      loads: where they come from, for people.
    """

    serve: Serve | None = None
    live: Callable[[Machine, Sequence[CoeRequest]], Serve] | None = None
    loads = "computed"

    def __init__(
        self,
        graph: CoeGraph,
        requests: Sequence[CoeRequest],
        machine: Machine,
        start_empty: bool = False,
        max_wait_s: float = 0.0,
    ):
        self.graph, self.requests, self.machine = graph, requests, machine
        if not any(request.component in graph.rules for request in requests):
            raise ConfigError(
                f"none of the {len(requests)} requests is of a component that has a "
                "rule; give the graph that belongs to them"
            )
        self._share_E = probability_E(graph, requests)
        self._start_empty, self._max_wait_s = start_empty, max_wait_s
        self._options = {"max_wait_s": max_wait_s} if max_wait_s else {}

    def on(self, machine: Machine, requests: Sequence[CoeRequest]) -> "CoeCase":
        """The same policies on another machine, live if this is, of other requests."""
        case = CoeCase(
            self.graph, requests, machine, self._start_empty, self._max_wait_s
        )
        if self.live is not None:
            case.live, case.serve = self.live, self.live(machine, requests)
            case.loads = self.loads
        return case

    def by_trial(
        self, name: str, most: Mapping[str, int] | None, trying: TrialOptions
    ) -> tuple["CoeCase", dict[str, Any]]:
        """The case on the machine that `chosen_machine` finds for a policy, and what
        was tried."""
        rules = self.graph.rules
        known = [one for one in self.requests if one.component in rules]
        sample = sample_of(known, trying.trial_share)

        def throughput(machine: Machine) -> float:
            found = self.on(machine, sample).run(name).throughput_per_s
            print(f"{_kinds(machine)}: {found:.4g} requests/s of a sample", flush=True)
            return found

        machine, tried = chosen_machine(
            *(self.machine, self.graph, throughput, most), trying
        )
        return self.on(machine, self.requests), tried

    def setup(self, name: str) -> Setup:
        """Queues, pools and tier of a policy at the start."""
        empty, options = self._start_empty, self._options
        return make_setup(
            *(name, self.graph, self.machine, self._share_E),
            start_empty=empty,
            options=options,
        )

    def run(self, name: str) -> CoeRun:
        return (
            self.simulate(name) if self.serve is None else self.serve(self.setup(name))
        )

    def simulate(self, name: str) -> CoeRun:
        """As `run`, in computed time."""
        simulator = CoeSimulator(self.graph, self.setup(name), self.machine.one_disk)
        return simulator.run(self.requests)

    def distinct(self, name: str = "coserve") -> int:
        """`least_switches` of `bounds`, with verdicts as they are drawn."""
        return self.bounds(name)["least_switches"]

    def bounds(self, name: str, run: CoeRun | None = None) -> dict:
        """What no order of requests can beat, with a policy's executors and start.

        Args:
          run: its experts and requests, without those that failed; None: as drawn.
        """
        setup = self.setup(name)
        used, judged = self._drawn, self.requests
        if run is not None:
            used, judged = used_by(run), [self.requests[n] for n in run.latency_s]
        last_s = max((request.arrival_s for request in judged), default=0.0)
        arrivals_s = max(last_s - self.requests[0].arrival_s, 0.0)
        one_disk = self.machine.one_disk
        return {
            "least_switches": coe_bounds.distinct(used, setup.start),
            "least_time_s": coe_bounds.time_s(setup, used, arrivals_s, one_disk),
        }

    def belady_fcfs(self, samba: CoeRun | None = None) -> int:
        """Loads that Samba's pool and start need in its order of requests.

        Args:
          samba: its run; None: in computed time.
        """
        alone, samba = self.setup("samba"), samba or self.simulate("samba")
        order = [step.expert for step in samba.steps if not step.failed]
        slots = alone.pools[0].budget_bytes // int(self.graph.bytes_E.min())
        experts = len(self.graph.experts)
        return coe_bounds.belady_fcfs(order, slots, alone.start, experts)

    @property
    def _drawn(self) -> Mapping[int, int]:
        return coe_bounds.uses(self.graph, self.requests)


def make_live(case: CoeCase, work: CoeWork, options: MachineOptions) -> str:
    """Lets a case run on this machine: the kind of its results.

    Raises:
      CheckpointError: weights that are missing or wrong.
    """
    from moe_edge.papers.coserve.coe.live import (
        Live,
        has_accelerator,
        with_measured_costs,
    )
    from moe_edge.papers.coserve.coe.store import CAN_FORGET, ExpertStore

    graph, folder = case.graph, work.graph_path.parent
    store = ExpertStore(graph, folder)
    store.check()
    real = has_accelerator() and options.profile not in PRESETS
    if options.profile is None or options.profile in PRESETS:
        case.machine = with_measured_costs(case.machine, graph, store, loads_too=real)
    images = folder if work.requests is None else work.requests_path.parent

    def live(machine: Machine, requests: Sequence[CoeRequest]) -> Serve:
        return Live(graph, store, machine, requests, images, emulated=not real).run

    case.live, case.serve = live, live(case.machine, case.requests)
    case.loads = EMULATED
    if real:
        case.loads = COLD if CAN_FORGET else CACHED
        print(case.loads, flush=True)
    return "measured" if real else "emulated"


def used_by(run: CoeRun) -> Mapping[int, int]:
    """Expert -> parts of requests that it judged."""
    return Counter(expert for chain in run.chains.values() for expert in chain)


def _kinds(machine: Machine) -> str:
    """Executors, and the bytes of the first kind's memory, for people."""
    said = ",".join(f"{kind}:{count}" for kind, count in machine.executors.items())
    return f"{said}, {machine.memory_bytes[machine.first]} bytes of {machine.first}"
