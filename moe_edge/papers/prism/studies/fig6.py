"""Prism, figure 6: who computes most at home, over time."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Findings
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import (
    PAPERS,
    Migration,
    Runs,
    cases_of,
    check_has_prism,
    serve,
)
from moe_edge.papers.prism.studies.served import EPLB, OPTIMUM, OURS, PRISM, median_row
from moe_edge.papers.prism.studies.table2 import INTERVAL_S, TABLE_2
from moe_edge.simulate.cluster.report import ClusterResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure6(Migration, Runs):
    """The size of the study.

    Attributes:
      methods: what is compared.
      window_s: of the local ratio over time.
    """

    requests_per_server: int = 80
    methods: Sequence[str] = (*PAPERS, OPTIMUM, OURS)
    window_s: float = 120.0


def check(settings: Figure6) -> None:
    """Refuses runs without Prism, or that last fewer than four windows."""
    check_has_prism(settings.methods)
    end_s = 0.9 * min(INTERVAL_S.values()) * settings.requests_per_server
    if end_s < 4 * settings.window_s:
        raise ConfigError(
            f"{settings.requests_per_server} requests a server last {end_s:g} s, "
            f"expected 4 windows of {settings.window_s:g} s; ask for more requests"
        )


def over_time(results: Sequence[ClusterResult]) -> list[float]:
    """Median over seeds of the local ratio in each window in which all have one."""
    windows = min(len(result.ratio_W) for result in results)
    table = np.stack([result.ratio_W[:windows] for result in results])
    full = windows - int(np.isnan(table).any(axis=0)[::-1].argmin())
    table = table[:, :full]
    return [
        float(np.median(column[~np.isnan(column)])) if (column == column).any() else 0.0
        for column in table.T
    ]


def share_between(result: ClusterResult, start_s: float, end_s: float) -> float:
    """Mean of the windows that lie between two times."""
    first, last = (int(round(t / result.window_s)) for t in (start_s, end_s))
    return float(np.nanmean(result.ratio_W[first:last]))


def measure(settings: Figure6) -> Findings:
    """Local ratio over time for every method, placed for other data at first."""
    metrics, curves, after, used = [], {}, {}, []
    for workload, model in TABLE_2:
        label, interval_s = f"{workload}, {model}", INTERVAL_S[workload]
        wanted = {"workload": workload, "model": model, "interval_s": interval_s}
        cases = cases_of(settings, **wanted, placed_for="c4")
        used.append(cases[0][1])
        end_s = 0.9 * interval_s * settings.requests_per_server
        changed_s = min(2 * settings.period_s, end_s / 2)
        spans = {
            "before the first migration": (0.0, settings.period_s),
            f"from {changed_s:.0f} s on": (changed_s, end_s),
        }
        curves[label], after[label] = {}, {}
        for method in settings.methods:
            found = [
                serve(case, method, seed, settings.window_s, **settings.moving)
                for seed, case in cases
            ]
            curves[label][method] = over_time(found)
            for part, span in spans.items():
                shares = [share_between(result, *span) for result in found]
                name = f"local ratio, {label}, {part}"
                metrics.append(median_row(method, name, shares, "1"))
            after[label][method] = round(float(np.median(shares)), 4)
            if "migrated" in found[0].facts:
                moved = [float(result.facts["migrated"]) for result in found]
                metrics.append(median_row(method, f"migrations, {label}", moved, "1"))
        print(f"figure 6: {label}: {after[label]}", flush=True)
    others = [m for m in settings.methods if m not in (PRISM, OPTIMUM, OURS)]
    shown = [m for m in (EPLB, PRISM, OPTIMUM, OURS) if m in settings.methods]
    best = {label: max(by, key=by.get) for label, by in after.items()}
    below = {label: by[best[label]] - by[PRISM] for label, by in after.items()}
    won = [label for label, points in below.items() if points == 0]
    at_home = [100 * by[PRISM] for by in after.values()]
    panels = [ratio_panel(label, by, settings.window_s) for label, by in curves.items()]
    return simulated(
        settings,
        used,
        answer="After the first migrations Prism's placement computes "
        f"{min(at_home):.1f} to {max(at_home):.1f} % at home; it is the highest of all "
        f"methods in {len(won)} of {len(after)} settings, otherwise at most "
        f"{100 * max(below.values()):.1f} points below.",
        details=[
            f"{label}, after the first migrations: "
            + ", ".join(f"{m} {100 * by[m]:.1f} %" for m in shown)
            + ("." if label in won else f"; highest: {best[label]}.")
            for label, by in after.items()
        ],
        workload={"placed_for": "c4", "intervals_s": INTERVAL_S},
        metrics=metrics,
        baselines=others,
        checks={
            "Prism is above the paper's baselines, after migrations": all(
                by[PRISM] >= by[m] for by in after.values() for m in others
            )
        },
        limits=[
            "Curves are medians over seeds, window by window; seeds do not all migrate "
            "at the same times.",
        ],
        ours={"local ratio after the first migrations": after},
        plot=lambda path: draw_panels(
            path, panels, title="Local compute ratio over time (simulated)"
        ),
        summary={"local_ratio_after": after},
        files=curves_file(settings.window_s, curves),
    )


def curves_file(window_s: float, curves: Mapping[str, Any]) -> dict[str, str]:
    """The file with all curves; `curves`: panel -> label -> local ratios."""
    found = {"window_s": window_s, "local_ratio": curves}
    return {"curves.json": json.dumps(found, indent=1) + "\n"}


def ratio_panel(
    title: str, curves: Mapping[str, Sequence[float]], window_s: float
) -> Panel:
    """Lines of local ratios over minutes."""
    count = max(len(curve) for curve in curves.values())
    return Panel(
        title,
        "computed locally",
        [round(window_s * (n + 0.5) / 60, 2) for n in range(count)],
        {
            method: [*curve, *[np.nan] * (count - len(curve))]
            for method, curve in curves.items()
        },
        x_label="minutes",
    )


STUDY = study_of(
    name="prism_fig6",
    question="Who computes most at home, over time (Prism, figure 6)?",
    settings=Figure6,
    measure=measure,
    check=check,
    source="Prism, figure 6: highest local ratio after migrations at 5 minutes "
    "(BigBench) and 10 minutes (MultiData)",
    paper={"trend": "Prism highest in all four panels"},
    why="The figure has no numbers in its text. First placed for general text (c4), as "
    "the paper's was for other data; the paper's rule of migration: every 5 minutes, "
    "all statistics kept, no hysteresis. Uniform and Redundance never migrate (IV-B).",
)
