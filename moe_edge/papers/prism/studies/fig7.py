"""Prism, figure 7: other data comes; with and without migration, over a grid of rules.

The paper's own rule (all statistics kept, no hysteresis) comes first; nothing of the
grid is picked. Two first placements: for general text, as the paper's was for other
data, and for the data that is asked at first.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.derived import spans
from moe_edge.bench.settings import FromZero, Positive, Seed, Share
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Estimate, Rows, Tables, counted, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.fig6 import tell_curve
from moe_edge.papers.prism.studies.runs import (
    ASSUMED,
    MEASURED,
    USAGE,
    Model,
    Runs,
    cases_of,
    serve,
)
from moe_edge.papers.prism.studies.served import OURS, PRISM, slower
from moe_edge.simulate.cluster.build import WORKLOADS
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.scenario import Scenario

FIRST, THEN = "multidata", "bigbench"
STARTS = {"placed for general text": "c4", "placed for the first data": None}
PAPER_RULE = (1.0, 0.0)  # keep, hysteresis
ALIKE = "the rules of a first placement start from the same local ratio"
# By (start, method, rule or None): the result of each seed.
Found = dict[tuple[str, str, tuple[float, float] | None], list[ClusterResult]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure7(Runs):
    """The size of the study.

    Attributes:
      model, interval_s: what serves; mean seconds between requests of a server.
      period_s: between two migrations.
      keeps, hystereses: the grid: share of statistics kept, gain that is asked for.
      window_s: of the local ratio over time.
    """

    seed: Seed = 101
    requests_per_server: int = 200
    model: Model = "deepseek_v2_lite"
    interval_s: Positive = 10.0
    period_s: FromZero = 300.0
    keeps: Sequence[Share] = (1.0, 0.5, 0.0)
    hystereses: Sequence[FromZero] = (0.0, 0.05)
    window_s: Positive = 120.0


def rule_name(rule: tuple[float, float] | None) -> str:
    """A point of the grid, or no migration."""
    if rule is None:
        return "no migration"
    return f"keep {rule[0]:g}, hysteresis {rule[1]:g}"


def late_mean(result: ClusterResult) -> float:
    """Mean latency of the requests with the new data."""
    new_R = np.isin(result.domain_R, WORKLOADS[THEN])
    return float(result.latency_R[new_R].mean())


def means(results: Sequence[ClusterResult], late: bool = False) -> np.ndarray:
    """float64 [seeds]: mean latency; of the new data alone where `late`."""
    return np.array([late_mean(r) if late else r.mean_latency_s for r in results])


def measure(settings: Figure7, rows: Rows) -> None:
    """Prism's placer over the whole grid, ours by the paper's rule."""
    grid = list(itertools.product(settings.keeps, settings.hystereses))
    rules = list(dict.fromkeys([PAPER_RULE, *grid]))
    found: Found = {}
    for start, placed_for in STARTS.items():
        wanted = {"workload": FIRST, "then_workload": THEN, "placed_for": placed_for}
        narrow = cases_of(settings, **wanted, **ASSUMED)
        tell_assumed(rows, settings, start, narrow)
        cases = cases_of(settings, **wanted, **MEASURED)
        for method, tried in ((PRISM, rules), (OURS, rules[:1])):
            for rule in (None, *tried):
                moving = {"period_s": 0.0}
                if rule is not None:
                    moving = dict(zip(("keep", "hysteresis"), rule, strict=True))
                    moving["period_s"] = settings.period_s
                found[start, method, rule] = results = [
                    serve(case, method, seed, settings.window_s, **moving)
                    for seed, case in cases
                ]
                told = f"{start}, {method}, {rule_name(rule)}"
                print(f"{told}: {np.median(means(results)):.4f} s", flush=True)
    tell_found(rows, found)
    if settings.window_s <= settings.period_s:
        rows.checks[ALIKE] = all(
            abs(results[0].ratio_W[0] - found[s, m, None][0].ratio_W[0]) < 1e-12
            for (s, m, _), results in found.items()
        )
    more = {"workload": FIRST, "then_workload": THEN, "starts": dict(STARTS)} | USAGE
    tell(rows, settings, [cases[0][1]], more, ["no migration"])


def tell_assumed(
    rows: Rows, settings: Figure7, start: str, cases: Sequence[tuple[int, Scenario]]
) -> None:
    """Adds the change by the paper's rule where tasks are assumed to be narrower."""
    keep, hysteresis = PAPER_RULE
    moving = {"keep": keep, "hysteresis": hysteresis}
    still, moved = (
        means([serve(c, PRISM, s, period_s=each, **moving) for s, c in cases])
        for each in (0.0, settings.period_s)
    )
    rows("assumed", start, change=of_seeds(moved / still - 1))


def tell_run(
    rows: Rows,
    at: tuple[str, str, str],
    results: Sequence[ClusterResult],
    base: Sequence[ClusterResult] | None,
) -> None:
    """Adds one run; `base`: those without migration, None for themselves."""
    values: dict[str, Estimate | float] = {
        "mean_s": of_seeds(means(results)),
        "new_data_s": of_seeds(means(results, late=True)),
        "local": of_seeds([result.local_ratio for result in results]),
    }
    if base is not None:
        over = means(results) / means(base)
        late = means(results, late=True) / means(base, late=True)
        values |= {"over": of_seeds(over), "over_new": of_seeds(late)}
        values |= {"worse": slower(over), "seeds": len(over)}
        for name, fact in (("migrations", "migrated"), ("moved", "moved_blocks")):
            count = float(np.median([result.facts[fact] for result in results]))
            values[name] = counted(count, len(results))
    rows("runs", *at, **values)
    for n in range(results[0].num_servers):
        seconds = of_seeds([result.latency_s_N[n] for result in results])
        rows("servers", *at, n + 1, seconds=seconds)
    tell_curve(rows, at, results)


def tell_found(rows: Rows, found: Found) -> None:
    """Adds the results of every (start, method, rule or None), and our placer's time
    over Prism's by the paper's rule and without migration."""
    for (start, method, rule), results in found.items():
        base = found[start, method, None] if rule is not None else None
        tell_run(rows, (start, method, rule_name(rule)), results, base)
    for start in STARTS:
        for rule in (None, PAPER_RULE):
            over, over_new = (
                means(found[start, OURS, rule], late)
                / means(found[start, PRISM, rule], late)
                for late in (False, True)
            )
            given = {"over": of_seeds(over), "over_new": of_seeds(over_new)}
            rows("placers", start, rule_name(rule), **given)


def derive(tables: Tables) -> dict[str, Any]:
    """Changes by rule; the paper's own rule; the span of the grid."""
    runs, placers, curves = (tables[name] for name in ("runs", "placers", "curves"))
    moved = runs[runs.over.notna()].copy()
    moved["change"] = moved.over - 1
    placers["change"], placers["change_new"] = placers.over - 1, placers.over_new - 1
    theirs = rule_name(PAPER_RULE)
    shown = curves[curves.rule.isin((theirs, rule_name(None)))]
    return {
        "changes": moved,
        "by_rule": moved[(moved.rule == theirs) & (moved.method == PRISM)],
        "ours_by_rule": moved[(moved.rule == theirs) & (moved.method == OURS)],
        "grid": spans(moved[moved.method == PRISM], "change", "start"),
        "unmoved": placers[placers.rule == rule_name(None)],
        "moving": placers[placers.rule == theirs],
        "lost": moved[moved.worse > 0],
        "shown": shown,
    }


FRAMES = {
    "runs": frame(
        "start method rule",
        "mean_s new_data_s local over over_new worse seeds migrations moved",
    ),
    "servers": frame("start method rule server", "seconds:s"),
    "assumed": frame("start", "change"),
    "placers": frame("start rule", "over over_new"),
    "curves": frame("start method rule minutes", "local"),
}
STUDY = Study("prism_fig7", Figure7, measure, FRAMES, derive)
