"""Figures 13 to 17 of CoServe, live at reduced size."""

from collections.abc import Mapping
from typing import Any

from moe_edge.bench.derived import spans
from moe_edge.bench.rounds import round_order
from moe_edge.metrics.frames import Rows, Tables, median
from moe_edge.papers.coserve.coe.machine import parse_executors
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.coe.trial import try_executors, with_executors
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.studies.entry import OURS, PAPER
from moe_edge.papers.coserve.studies.live import Executors, LiveSettings
from moe_edge.papers.coserve.studies.live_entry import board_folder, tell
from moe_edge.papers.coserve.studies.live_runs import begin, run_tasks

LEAST = "least loads"
FIGURES = ("throughput_per_s", "time_s", "switches")
COSTS = ("scheduling_ratio", "management_ratio")


def measure_tasks(settings: LiveSettings, rows: Rows) -> None:
    """Every policy on every task, beside computed time."""
    with board_folder(settings) as root:
        found = run_tasks(settings, root)
    base = settings.policies[0]
    for task, one in found.items():
        for policy in one.runs:
            values = {name: one.figures(policy, name) for name in (*FIGURES, *COSTS)}
            for figure in ("time_s", "switches"):
                name = f"{figure.removesuffix('_s')}_over_computed"
                values[name] = one.over_simulated(policy, figure)
            if policy != base:
                values["over_first"] = one.ratios(policy, base)
            medians = {name: median(each) for name, each in values.items()}
            rows("runs", task, policy, **medians)
        least = one.distinct.get(OURS, next(iter(one.distinct.values())))
        rows("runs", task, LEAST, switches=least)
    tell(rows, settings, found)
    names = next(iter(found.values())).runs
    rows.about["baselines"] = [name for name in names if name not in (PAPER, OURS)]


def derive_tasks(tables: Tables) -> dict[str, Any]:
    """Throughput over the first policy's, and how far live is from computed time."""
    runs = tables["runs"]
    switches = runs.pivot(index="task", columns="policy", values="switches")
    ours = switches[OURS] / switches[LEAST].clip(lower=1) if OURS in switches else []
    return {
        "base": runs.policy.iloc[0],
        "over": spans(runs.dropna(subset="over_first"), "over_first", "policy"),
        "apart_time": (runs.time_over_computed - 1).abs().max(),
        "apart_switches": (runs.switches_over_computed - 1).abs().max(),
        "over_least": ours,
        "shown": [PAPER, OURS],
        "ran": runs[runs.policy != LEAST],
    }


def measure_executors(settings: Executors, rows: Rows) -> None:
    """CoServe with several numbers of executors."""
    tasks, policy = {}, settings.policies[0]
    for task in settings.tasks:
        with board_folder(settings) as root:
            live = tasks[task] = begin(settings, task, root)
            case = live.case
            cases = {
                text: case.on(
                    with_executors(case.machine, parse_executors(text)), case.requests
                )
                for text in settings.executors
            }
            live.runs = _in_rounds(cases, policy, settings.repeats)
        for text, runs in live.runs.items():
            rate = median([run.throughput_per_s for run in runs])
            computed = cases[text].simulate(policy).throughput_per_s
            rows("runs", task, text, throughput_per_s=rate, computed_per_s=computed)
    tell(rows, settings, tasks)


def derive_executors(tables: Tables) -> dict[str, Any]:
    """What a trial would choose, one kind after the other, and all over the best."""
    runs = tables["runs"]
    chosen = {
        task: _tried(dict(zip(some.executors, some.throughput_per_s, strict=True)))
        for task, some in runs.groupby("task", sort=False)
    }
    most = runs.groupby("task").throughput_per_s.transform("max")
    over = runs[["task", "executors"]].assign(over=runs.throughput_per_s / most)
    best = [{"task": t, "executors": e} for t, e in chosen.items()]
    return {"best": best, "over": over}


def _in_rounds(
    cases: Mapping[str, CoeCase], policy: str, repeats: int
) -> dict[str, list[CoeRun]]:
    found: dict[str, list[CoeRun]] = {text: [] for text in cases}
    for number in range(repeats):
        for text in round_order(list(cases), number):
            run = cases[text].run(policy)
            found[text].append(run)
            print(f"{text}: {run.throughput_per_s:.4g} requests/s", flush=True)
    return found


def _tried(values: Mapping[str, float]) -> str:
    """What `try_executors` would take, if it measured these."""
    known = {frozenset(parse_executors(t).items()): v for t, v in values.items()}
    most: dict[str, int] = {}
    for text in values:
        for kind, count in parse_executors(text).items():
            most[kind] = max(most.get(kind, 0), count)
    trial = try_executors(most, lambda found: known.get(frozenset(found.items()), 0.0))
    return ",".join(f"{kind}:{count}" for kind, count in trial.executors.items())
