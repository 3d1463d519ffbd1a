"""What the studies of placement (Prism) share: runs in computed time, rows of entries.

A `Case` is built once for a seed: every method, line and memory size serves the same
requests with the same routing, so that ratios are of pairs.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.hardware.clusters import build_cluster
from moe_edge.hardware.models import ModelShape
from moe_edge.metrics.results import metric
from moe_edge.simulate.cluster.build import build_case
from moe_edge.simulate.cluster.case import Case
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.report import ClusterResult, report
from moe_edge.simulate.cluster.run import sources
from moe_edge.studies.prism.settings import (
    EPLB,
    LIMITS,
    OPTIMUM,
    OURS,
    PRISM,
    REASON,
    Runs,
)
from moe_edge.studies.smoe.settings import claim
from moe_edge.studies.study import Findings

SPREAD = "half range of seeds"
EQUAL = 5e-4  # relative: latencies closer than that count as equal
MEAN, LOCAL = "mean_latency_s", "local_ratio"

Row = dict[str, Any]
Rows = dict[str, list[Row]]  # method -> one row a seed


def on_cluster(case: Case, cluster: str, **options) -> Case:
    """The same requests on other machines (as many servers)."""
    machines = build_cluster(cluster, **options)
    return dataclasses.replace(case, cost_model=case.shape.costs(machines))


def serve(
    case: Case, method: str, seed: int, window_s: float = 120.0, **moving
) -> ClusterResult:
    """Runs one method to its end."""
    loop = case.loop(method, LoopOptions(window_s=window_s), seed=seed, **moving)
    loop.run()
    return report(loop)


def serve_all(
    cases: Iterable[tuple[int, Case]], methods: Sequence[str], label: str, **moving
) -> Rows:
    """Every method on every (seed, case)."""
    found: Rows = {method: [] for method in methods}
    for seed, case in cases:
        for method in methods:
            found[method].append(serve(case, method, seed, **moving).row())
        shown = ", ".join(f"{m} {rows[-1][MEAN]:.3f}" for m, rows in found.items())
        print(f"{label}, seed {seed}: {shown}", flush=True)
    return found


def cases_of(settings: Runs, **wanted) -> list[tuple[int, Case]]:
    """A case for every seed, as the settings and `wanted` say."""
    names = ("model", "workload", "interval_s", "requests_per_server")
    common = {
        name: getattr(settings, name) for name in names if hasattr(settings, name)
    }
    return [
        (seed, build_case(**common | wanted, seed=seed)) for seed in settings.all_seeds
    ]


def values(rows: Sequence[Row], key: str = MEAN) -> np.ndarray:
    """float64 [seeds]."""
    return np.array([row[key] for row in rows], np.float64)


def median_row(
    method: str, name: str, found: Sequence[float], unit: str = "s"
) -> dict[str, Any]:
    """A metric: the median over seeds with half their range."""
    spread = (SPREAD, float(np.ptp(found)) / 2)
    return metric(method, name, float(np.median(found)), unit, len(found), spread)


def ratio(rows: Rows, method: str, over: str, key: str = MEAN) -> np.ndarray:
    """float64 [seeds]: one method's mean latency over another's, seed by seed."""
    return values(rows[method], key) / values(rows[over], key)


def percent(found: Sequence[float]) -> str:
    """How far a ratio is from 1, such as `-12.3 %`; the median over seeds."""
    return f"{100 * (float(np.median(found)) - 1):+.1f} %"


def slower(ratios: np.ndarray) -> int:
    """In how many seeds a ratio of latencies is above 1 by more than EQUAL."""
    return int((ratios > 1 + EQUAL).sum())


def losses(rows: Rows, method: str, over: str) -> str | None:
    """In how many seeds a method that ought to win was slower; None if in none."""
    if method not in rows or over not in rows:
        return None
    found = ratio(rows, method, over)
    worse = slower(found)
    if not worse:
        return None
    return (
        f"{method} slower than {over} in {worse} of {len(found)} seeds "
        f"(median {percent(found)})"
    )


def worse_than(rows_of: Mapping[str, Rows]) -> str:
    """Where our placer or the optimum of eq. 2 loses, case by case."""
    pairs = ((OURS, OPTIMUM), (OURS, PRISM), (OURS, EPLB), (OPTIMUM, PRISM))
    pairs += ((PRISM, EPLB),)
    found = []
    for label, rows in rows_of.items():
        lost = [text for pair in pairs if (text := losses(rows, *pair))]
        if lost:
            found.append(f"{label}: {'; '.join(lost)}")
    return "Slower than it should be: " + (" | ".join(found) or "nowhere") + "."


def prism_claim(source: str, paper: Mapping, ours: Mapping, why: str) -> dict[str, Any]:
    """`paper_claim`, marked as not comparable, with the reason."""
    found = claim(source, paper, ours, why)
    return found | {"comparable": False, "reason": REASON}


def shape_entry(*shapes: ModelShape) -> dict[str, Any]:
    """`model` of an entry: only shapes took part; params are of a token's layers."""
    params = {
        shape.name: int(
            shape.num_blocks * shape.block.flops(1) / 2
            + shape.num_layers * shape.dense.flops_per_token / 2
        )
        for shape in shapes
    }
    return {
        "name": ", ".join(params),
        "params": params if len(params) > 1 else next(iter(params.values())),
        "weights": "none: shapes only, routing generated",
    }


def workload_entry(settings: Runs, case: Case, **facts) -> dict[str, Any]:
    """`workload` of an entry."""
    return {
        "comparable": False,
        "why_not_comparable": REASON,
        "routing": "generated by moe_edge/workload/routing_model.py",
        "requests_per_server": settings.requests_per_server,
        "arrivals": "poisson",
        "max_batch": LoopOptions().max_batch,
        **facts,
        "hardware": sources(case),
    }


def simulated(
    settings: Runs,
    cases: Sequence[tuple[int, Case]],
    *,
    workload: Mapping[str, Any],
    limits: Sequence[str] = (),
    shapes: Sequence[ModelShape] = (),
    **found,
) -> Findings:
    """Findings of runs in computed time.

    Args:
      settings: of the study.
      cases: of the first workload; tells model and hardware.
      workload: facts of the study, added to what all studies say of theirs.
      limits: of the study alone.
      shapes: of all models, where the study has several.
      found: further fields of Findings.
    """
    case = cases[0][1]
    return Findings(
        model=shape_entry(*(shapes or [case.shape])),
        workload=workload_entry(settings, case, **workload),
        limits=[*LIMITS, *limits],
        kind="simulated",
        cost_model_source="preset",
        seeds=settings.all_seeds,
        **found,
    )


def cells(rows: Rows) -> dict[str, list[float]]:
    """method -> seconds on each server and the mean over all requests; medians."""
    found = {}
    for method, by_seed in rows.items():
        table = np.array([[*row["latency_s_N"], row[MEAN]] for row in by_seed])
        found[method] = [round(float(x), 4) for x in np.median(table, axis=0)]
    return found


def stored(rows_of: Mapping[str, Rows]) -> str:
    """All seeds, without the list of decisions."""
    kept = {
        label: {
            method: [
                {k: v for k, v in row.items() if k != "migrations"} for row in some
            ]
            for method, some in rows.items()
        }
        for label, rows in rows_of.items()
    }
    return json.dumps(kept, indent=1, allow_nan=False) + "\n"


def served(rows: Rows) -> bool:
    """All latencies are there, and none is negative."""
    return all(
        None not in row["latency_s_N"] and min(row["latency_s_N"]) > 0
        for by_seed in rows.values()
        for row in by_seed
    )
