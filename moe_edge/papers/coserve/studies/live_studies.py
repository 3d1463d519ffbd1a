"""Figures 13 to 17 of CoServe, live at reduced size."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.rounds import median_metric, median_panel, round_order
from moe_edge.bench.study import Findings, median_and_spread
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.coserve.coe.machine import parse_executors
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.coe.trial import try_executors, with_executors
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.studies.entry import OURS, PAPER
from moe_edge.papers.coserve.studies.live import AllPolicies, Executors
from moe_edge.papers.coserve.studies.live_entry import board_folder, live_findings
from moe_edge.papers.coserve.studies.live_runs import (
    LiveTask,
    begin,
    run_tasks,
)


def measure_tasks(settings: AllPolicies) -> Findings:
    """Every policy on every task, beside computed time."""
    with board_folder(settings) as root:
        found = run_tasks(settings, root)
    base, names = settings.policies[0], list(next(iter(found.values())).runs)
    ratios = {
        policy: [median_and_spread(one.ratios(policy, base)) for one in found.values()]
        for policy in names
        if policy != base
    }
    least = [
        float(np.median(one.figures(OURS, "switches"))) / max(one.distinct[OURS], 1)
        for one in found.values()
        if OURS in one.runs
    ]
    apart = {
        figure: [
            abs(float(np.median(one.over_simulated(policy, figure))) - 1)
            for one in found.values()
            for policy in names
        ]
        for figure in ("time_s", "switches")
    }
    spans = {policy: _span([v for v, _ in each]) for policy, each in ratios.items()}
    shown = ", ".join(f"{p} {spans[p]}" for p in (PAPER, OURS) if p in spans)
    rows = [row for task, one in found.items() for row in task_rows(task, one, base)]
    return live_findings(
        settings,
        found,
        answer=f"Live over {base}: {shown} times by task; computed times are at most "
        f"{max(apart['time_s']):.0%} apart.",
        details=[
            *(f"{policy} over {base}: {span} times." for policy, span in spans.items()),
            f"Switches of {OURS} over the least: {_span(least)}." if least else "",
            "Live apart from computed, largest: "
            f"time {max(apart['time_s']):.1%}, switches {max(apart['switches']):.1%}.",
        ],
        metrics=rows,
        baselines=[name for name in names if name not in (PAPER, OURS)],
        ours={"throughput over Samba": spans},
        plot=lambda path: draw_panels(
            path, _task_panels(found, names), title="CoServe's tasks, live"
        ),
        summary={"throughput_over_first": spans, "apart": apart},
    )


def task_rows(task: str, one: LiveTask, base: str) -> list[dict[str, Any]]:
    """Metric rows of a task."""
    rows = []
    for policy in one.runs:
        for figure, unit in (
            ("throughput_per_s", "requests/s"),
            ("time_s", "s"),
            ("switches", "1"),
            ("scheduling_ratio", "1"),
            ("management_ratio", "1"),
        ):
            name = f"{figure.removesuffix('_per_s').removesuffix('_s')}, {task}"
            rows.append(median_metric(policy, name, one.figures(policy, figure), unit))
        for figure in ("time_s", "switches"):
            name = f"{figure.removesuffix('_s')} over computed, {task}"
            ratios = one.over_simulated(policy, figure)
            rows.append(median_metric(policy, name, ratios, "1"))
        if policy != base:
            name = f"throughput over {base}, {task}"
            rows.append(median_metric(policy, name, one.ratios(policy, base), "1"))
    least = one.distinct.get(OURS, next(iter(one.distinct.values())))
    return [*rows, metric("least loads", f"switches, {task}", least, "1")]


def _task_panels(found: Mapping[str, LiveTask], names: Sequence[str]) -> list[Panel]:
    tasks = list(found)
    panels = []
    for figure, title, unit, log in (
        ("throughput_per_s", "throughput", "requests/s", False),
        ("switches", "switches", "loads", True),
    ):
        values = {
            name: [one.figures(name, figure) for one in found.values()]
            for name in names
        }
        panels.append(median_panel(title, unit, tasks, values, log=log))
    return panels


def measure_executors(settings: Executors) -> Findings:
    """CoServe with several numbers of executors, and what a trial would choose."""
    rows, best, panels, tasks = [], {}, [], {}
    policy = settings.policies[0]
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
            found = _in_rounds(cases, policy, settings.repeats)
        live.runs = {text: list(runs) for text, runs in found.items()}
        values = {
            text: [run.throughput_per_s for run in runs] for text, runs in found.items()
        }
        for text, each in values.items():
            rows.append(median_metric(text, f"throughput, {task}", each, "requests/s"))
            computed = cases[text].simulate(policy).throughput_per_s
            name = f"throughput, {task}, computed"
            rows.append(metric(text, name, computed, "requests/s"))
        best[task] = _tried({t: float(np.median(v)) for t, v in values.items()})
        panels.append(
            median_panel(
                f"{task}, {policy}",
                "requests/s",
                [task],
                {text: [each] for text, each in values.items()},
            )
        )
        print(f"{task}: by trial {best[task]}", flush=True)
    said = ", ".join(f"{task} {text}" for task, text in best.items())
    return live_findings(
        settings,
        tasks,
        answer=f"By trial, one kind after the other, {policy} runs best with {said}.",
        metrics=rows,
        ours={"best": best},
        limits=["All executors share this machine's processor, whatever their kind."],
        plot=lambda path: draw_panels(path, panels, title="Executors, live"),
        summary={"best": best},
    )


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


def _span(values: Sequence[float]) -> str:
    """The least and the largest, such as `3.7-4.7`."""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low}-{high}"
