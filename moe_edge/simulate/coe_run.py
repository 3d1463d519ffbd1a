"""The root of launch/coserve.py: requests for many experts, policy by policy, live on
this machine or in computed time."""

import contextlib
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.coe.case import CoeWork, MachineOptions, probability_E
from moe_edge.coe.machine import Machine
from moe_edge.coe.presets import PRESETS
from moe_edge.coe.results import CoeRun, outputs, progress, row, run_events
from moe_edge.coe.setup import Setup, make_setup
from moe_edge.core.checks import ConfigError, check_from_zero
from moe_edge.core.events import write_events
from moe_edge.core.files import read_json, write_json, write_text
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.schedule.coe_recipes import chosen_recipes
from moe_edge.simulate import coe_bounds
from moe_edge.simulate.coe import CoeSimulator
from moe_edge.workload.coe_graph import CoeGraph
from moe_edge.workload.coe_tasks import CoeRequest

ACCURACY = "accuracy.json"  # beside the graph, of those who trained its experts


@root
@unpacked(work=CoeWork, options=MachineOptions)
def run_coserve(
    run: RunFolder,
    *,
    work: CoeWork,
    options: MachineOptions,
    policies: str = "samba,coserve,affinity",
    max_wait_s: float = 30.0,
    start_empty: bool = False,
    events: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves the same requests by every policy, and compares.

    Args:
      run: folder of `coserve.json`, `outputs_POLICY.jsonl` and, with `events`,
        `events_POLICY.jsonl`.
      work: who judges what; options: on what.
      policies: samba, samba_no_tier, samba_fifo, samba_parallel, none, em, em_ra,
        coserve, affinity, separated by commas; or `all`.
      max_wait_s: who has waited that long is next, under affinity; 0: no bound.
      start_empty: nothing is resident at first.
      events: write what was loaded, computed and evicted.
      seed: of a task's board and requests.
    Raises:
      MoeEdgeError: bad input.
    """
    check_from_zero("max_wait_s", max_wait_s)
    names = chosen_recipes(policies)
    with with_weights(work, options, seed, run.dry_run) as given:
        graph, requests = given.build(options.costs, seed)
        case = Case(graph, requests, options.build(graph), start_empty, max_wait_s)
        for name in names:
            case.setup(name)
        if run.dry_run:
            return {"task": work.name, "policies": names}
        kind = make_live(case, given, options) if options.live else "simulated"
        runs = {}
        for name in names:
            runs[name] = case.run(name)
            print(progress(name, runs[name]), flush=True)
    answers = [found.answers for found in runs.values()]
    summary = {
        "task": work.name,
        "kind": kind,
        "policies": {name: row(found) for name, found in runs.items()},
        "bounds": case.bounds(runs),
        "distinct_experts": len(used_by(runs)),
        "verdicts_equal": all(one == answers[0] for one in answers),
        "accuracy": accuracy_of(work) if options.live else None,
    }
    with run.writing() as folder:
        settings = vars(work) | vars(options) | {"seed": seed}
        stored = {"settings": settings, "source": case.machine.source, **summary}
        write_json(folder / "coserve.json", stored)
        for name, found in runs.items():
            text = "".join(
                json.dumps(line) + "\n" for line in outputs(graph, requests, found)
            )
            write_text(folder / f"outputs_{name}.jsonl", text)
            if events:
                told = run_events(found, graph.bytes_E.tolist())
                write_events(folder / f"events_{name}.jsonl", told)
    return summary


@contextlib.contextmanager
def with_weights(
    work: CoeWork, options: MachineOptions, seed: int, dry_run: bool
) -> Iterator[CoeWork]:
    """The work, with the task's board in files if it is to run live and names none."""
    if not options.live or work.graph is not None or dry_run:
        yield work
        return
    from moe_edge.coe.random_board import write_board

    with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
        path = write_board(Path(folder), work.task, seed, work.decay)
        yield dataclasses.replace(work, graph=str(path))


def accuracy_of(work: CoeWork) -> Mapping[str, Any] | None:
    """What those who trained the graph's experts wrote beside it."""
    if work.graph is None:
        return None
    path = work.graph_path.parent / ACCURACY
    return read_json(path) if path.exists() else None


def make_live(case: "Case", work: CoeWork, options: MachineOptions) -> str:
    """Lets a case run on this machine: the kind of its results.

    Raises:
      CheckpointError: weights that are missing or wrong.
    """
    from moe_edge.coe.live import Live, has_accelerator, with_measured_costs
    from moe_edge.coe.store import ExpertStore

    graph, folder = case.graph, work.graph_path.parent
    store = ExpertStore(graph, folder)
    store.check()
    real = has_accelerator() and options.profile not in PRESETS
    if options.profile is None or options.profile in PRESETS:
        case.machine = with_measured_costs(case.machine, graph, store, loads_too=real)
    images = folder if work.requests is None else work.requests_path.parent
    live = Live(graph, store, case.machine, case.requests, images, emulated=not real)
    case.serve = live.run
    return "measured" if real else "emulated"


def used_by(runs: Mapping[str, CoeRun]) -> Mapping[int, int]:
    """Expert -> parts of requests that it judged; all runs judge the same."""
    chains = next(iter(runs.values())).chains
    return Counter(expert for chain in chains.values() for expert in chain)


class Case:
    """The same requests on the same machine for every policy.

    Attributes:
      graph, requests, machine: what it is about.
      serve: runs a policy's setup; None: in computed time.
    """

    serve: Callable[[Setup], CoeRun] | None = None

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
        self._start_empty = start_empty
        self._options = {"max_wait_s": max_wait_s} if max_wait_s else {}

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
        """Loads without which a policy's start cannot do, in any order of requests."""
        used = coe_bounds.uses(self.graph, self.requests)
        return coe_bounds.distinct(used, self.setup(name).start)

    def bounds(self, runs: Mapping[str, CoeRun]) -> dict[str, float]:
        """What CoServe's layout cannot beat, and Samba's in its order of requests."""
        setup, alone, used = self.setup("coserve"), self.setup("samba"), used_by(runs)
        samba = runs.get("samba") or self.simulate("samba")
        order = [step.expert for step in samba.steps]
        slots = alone.pools[0].budget_bytes // int(self.graph.bytes_E.min())
        arrivals = self.requests[-1].arrival_s - self.requests[0].arrival_s
        experts = len(self.graph.experts)
        return {
            "distinct": coe_bounds.distinct(used, setup.start),
            "belady_fcfs": coe_bounds.belady_fcfs(order, slots, alone.start, experts),
            "time_s": coe_bounds.time_s(setup, used, arrivals, self.machine.one_disk),
        }
