"""Prism, figure 6: who computes most at home, over time, by measured usage."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.derived import wide
from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import (
    ASSUMED,
    MEASURED,
    PAPERS,
    USAGE,
    Method,
    Migration,
    Runs,
    cases_of,
    check_has_prism,
    serve,
)
from moe_edge.papers.prism.studies.served import OPTIMUM, OURS, PRISM
from moe_edge.papers.prism.studies.table2 import INTERVAL_S, TABLE_2
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.scenario import Scenario


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure6(Migration, Runs):
    """The size of the study.

    Attributes:
      methods: what is compared.
      window_s: of the local ratio over time.
    """

    requests_per_server: int = 80
    methods: Sequence[Method] = (*PAPERS, OPTIMUM, OURS)
    window_s: Positive = 120.0


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


def serve_each(
    settings: Figure6, cases: Sequence[tuple[int, Scenario]], method: str
) -> list[ClusterResult]:
    """One method on every seed."""
    window_s, moving = settings.window_s, settings.moving
    return [serve(case, method, seed, window_s, **moving) for seed, case in cases]


def measure(settings: Figure6, rows: Rows) -> None:
    """Local ratio over time for every method, placed for other data at first."""
    used = []
    for workload, model in TABLE_2:
        interval_s = INTERVAL_S[workload]
        wanted = {"workload": workload, "model": model, "interval_s": interval_s}
        wanted["placed_for"] = "c4"
        cases = cases_of(settings, **wanted, **MEASURED)
        used.append(cases[0][1])
        end_s = 0.9 * interval_s * settings.requests_per_server
        changed_s = min(2 * settings.period_s, end_s / 2)
        spans_s = {"before": (0.0, settings.period_s), "after": (changed_s, end_s)}
        for method in settings.methods:
            found = serve_each(settings, cases, method)
            values = {
                part: of_seeds([share_between(result, *span) for result in found])
                for part, span in spans_s.items()
            }
            if "migrated" in found[0].facts:
                moved = [float(result.facts["migrated"]) for result in found]
                values["migrations"] = of_seeds(moved)
            rows("ratios", workload, model, method, **values)
            tell_curve(rows, (workload, model, method), found)
        if workload == "bigbench":
            narrow = cases_of(settings, **wanted, **ASSUMED)
            for method in settings.methods:
                found = serve_each(settings, narrow, method)
                after = of_seeds([share_between(r, *spans_s["after"]) for r in found])
                rows("assumed", workload, model, method, after=after)
        print(f"figure 6: {workload}, {model}: served", flush=True)
    more = {"placed_for": "c4", "intervals_s": INTERVAL_S} | USAGE
    others = [m for m in settings.methods if m not in (PRISM, OPTIMUM, OURS)]
    tell(rows, settings, used, more, others)


def tell_curve(rows: Rows, at: tuple, found: Sequence[ClusterResult]) -> None:
    """Adds local ratios by the middle of their windows."""
    for window, local in enumerate(over_time(found)):
        minutes = round(found[0].window_s * (window + 0.5) / 60, 2)
        rows("curves", *at, minutes, local=local)


def derive(tables: Tables) -> dict[str, Any]:
    """Prism beside the paper's methods, and beside the highest of all, after the first
    migrations."""
    ratios = tables["ratios"]
    after = wide(ratios, "after", "method", "workload model")
    baselines = after.drop(columns=[PRISM, OPTIMUM, OURS], errors="ignore")
    above = "Prism is above the paper's baselines, after migrations"
    wins = baselines.le(after[PRISM], axis=0).all(axis=1)
    settings = after.assign(
        best=after.idxmax(axis=1), below=after.max(axis=1) - after[PRISM]
    ).reset_index()
    return {
        "at_home": after[PRISM],
        "settings": settings[["workload", "model", "best", "below"]],
        "won": wins.sum(),
        "most_below": settings.below.max(),
        "checks": {above: bool(wins.all())},
    }


FRAMES = {
    "ratios": frame("workload model method", "before after migrations"),
    "curves": frame("workload model method minutes", "local"),
    "assumed": frame("workload model method", "after"),
}
STUDY = Study("prism_fig6", Figure6, measure, FRAMES, derive, check=check)
