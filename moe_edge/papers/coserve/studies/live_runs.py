"""Runs CoServe's tasks live at reduced size, in rounds, beside computed time."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_edge.bench.rounds import round_order
from moe_edge.papers.coserve.coe.case import MAX_WAIT_S, CoeWork, MachineOptions
from moe_edge.papers.coserve.coe.random_board import write_board
from moe_edge.papers.coserve.coe.results import CoeRun, row
from moe_edge.papers.coserve.simulate.coe_case import CoeCase, make_live, used_by
from moe_edge.papers.coserve.studies.entry import OURS
from moe_edge.papers.coserve.studies.live import LiveSettings
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import DAMAGED, TASKS, CoeRequest


@dataclasses.dataclass
class LiveTask:
    """A task, and what the rounds gave.

    Attributes:
      case: served live; kind: of its results.
      runs: policy -> a run a round; those that run once have one.
      simulated: policy -> the same in computed time, with the same verdicts.
      distinct: least loads from the start of ours, and of all others on all executors.
    """

    case: CoeCase
    kind: str
    runs: dict[str, list[CoeRun]]
    simulated: dict[str, CoeRun] = dataclasses.field(default_factory=dict)
    distinct: dict[str, int] = dataclasses.field(default_factory=dict)

    def figures(self, policy: str, name: str) -> list[float]:
        """A figure of `coe.results.row` in each round."""
        return [row(run)[name] for run in self.runs[policy]]

    def ratios(self, policy: str, to: str) -> list[float]:
        """Throughput over another policy's, in the rounds that have both."""
        pairs = zip(self.runs[policy], self.runs[to], strict=False)
        return [one.throughput_per_s / other.throughput_per_s for one, other in pairs]

    def over_simulated(self, policy: str, name: str) -> list[float]:
        """A figure over that in computed time, in each round; none over none is 1."""
        computed = row(self.simulated[policy])[name]
        values = self.figures(policy, name)
        return [1.0 if v == computed else v / (computed or 1) for v in values]

    @property
    def equal(self) -> bool:
        """Whether every run gave each request the same verdict by the same experts."""
        answers = [run.answers for runs in self.runs.values() for run in runs]
        return all(one == answers[0] for one in answers)

    @property
    def complete(self) -> bool:
        """Whether no request failed."""
        return not any(run.failed for runs in self.runs.values() for run in runs)


def run_tasks(settings: LiveSettings, root: Path) -> dict[str, LiveTask]:
    """All tasks; boards that tasks share are written once.

    Args:
      root: folder of the boards.
    """
    return {task: run_task(settings, task, root) for task in settings.tasks}


def run_task(settings: LiveSettings, task: str, root: Path) -> LiveTask:
    """Every policy of a task, in rounds; those of `once` in the first round only."""
    live = begin(settings, task, root)
    everyone = [*settings.policies, *(settings.once or ())]
    for number in range(settings.repeats):
        names = settings.policies if number else everyone
        for name in round_order(list(names), number):
            run = live.case.run(name)
            live.runs[name].append(run)
            print(f"{task}, round {number}: {_told(name, run)}", flush=True)
    finish(live)
    return live


def begin(settings: LiveSettings, task: str, root: Path) -> LiveTask:
    """Board, weights, compiled programs and images of a task."""
    if settings.graph is None:
        given = task, settings.seed, settings.decay, settings.most_types
        folder = root / "_".join(map(str, ("board", TASKS[task].board, *given[1:])))
        path = folder / "coe.json"
        path = path if path.exists() else write_board(folder, *given)
    else:
        path = settings.graph
    work = CoeWork(graph=str(path), task=task)
    options = MachineOptions(profile="reduced", memory=settings.memory)
    graph, requests = work.build(options.costs, settings.seed)
    requests = requests[: settings.most_requests]
    case = CoeCase(graph, requests, options.build(graph), max_wait_s=MAX_WAIT_S)
    kind = make_live(case, work, options)
    runs = {name: [] for name in (*settings.policies, *(settings.once or ()))}
    return LiveTask(case, kind, runs)


def finish(live: LiveTask) -> None:
    """The same in computed time."""
    case, first = live.case, next(runs[0] for runs in live.runs.values() if runs)
    requests = as_judged(case.graph, case.requests, first)
    computed = CoeCase(case.graph, requests, case.machine, max_wait_s=MAX_WAIT_S)
    live.simulated = {name: computed.simulate(name) for name in live.runs}
    used = set(used_by(first))
    for name in live.runs:
        start = OURS if name == OURS else "coserve"
        live.distinct[name] = len(used - case.setup(start).start)


def as_judged(
    graph: CoeGraph, requests: Sequence[CoeRequest], run: CoeRun
) -> list[CoeRequest]:
    """Requests that are drawn as a run's networks judged them: a simulator, which goes
    by what was drawn, then gives them the same experts."""
    found = []
    for number, request in enumerate(requests):
        first = graph.rules.get(request.component)
        stopped = first in graph.follow and len(run.chains.get(number, ())) == 1
        image = {"seed": 0, "defect": DAMAGED if stopped else None}
        found.append(dataclasses.replace(request, image=image))
    return found


def _told(name: str, run: CoeRun) -> str:
    return (
        f"{name} {run.throughput_per_s:.4g} requests/s, {run.time_s:.4g} s, "
        f"{run.switches} switches"
    )
