"""What the studies of placement (Prism) tell: sums over seeds, parts of an entry."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.hardware.models import ModelShape
from moe_edge.metrics.plots_panels import Panel
from moe_edge.metrics.results import metric
from moe_edge.simulate.cluster.case import Case
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.run import sources
from moe_edge.studies.prism.runs import (
    EPLB,
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
    Row,
    Rows,
    Runs,
)
from moe_edge.studies.study import Claim, Findings, Study, nothing_to_check

SPREAD = "half range of seeds"
EQUAL = 5e-4  # relative: latencies closer than that count as equal
REASON = (
    "The routing is generated (fitted to measured domains, the narrow tasks assumed) "
    "and so are lengths and arrivals; the cost model is a preset without the software "
    "of the paper's test bed, whose seconds are several times ours. Compare ratios."
)
LIMITS = (
    "Simulated: no GPU and no network took part. Devices and lines are presets (device "
    "rates assumed at fixed shares of datasheet peaks), not calibrated on a machine.",
    "Software overheads (Python, serialisation, TCP, Docker, batching) are not "
    "modelled, nor are the head, sampling and the KV cache.",
    "BIG-bench tasks are generated: the skew of narrow tasks is an assumption "
    "(`TASK_SKEW` in workload/routing_model.py), studied in prism_sensitivity.",
    "Spreads are over seeds of arrivals, lengths, routing and random placements.",
)


def values(rows: Sequence[Row], key: str = MEAN) -> np.ndarray:
    """float64 [seeds]."""
    return np.array([row[key] for row in rows], np.float64)


def median_row(
    method: str, name: str, found: Sequence[float], unit: str = "s"
) -> dict[str, Any]:
    """A metric: the median over seeds with half their range."""
    spread = (SPREAD, float(np.ptp(found)) / 2)
    return metric(method, name, float(np.median(found)), unit, len(found), spread)


def seed_panel(
    title: str,
    y_label: str,
    x: Sequence[str],
    series: Mapping[str, Sequence[Sequence[float]]],
    **options,
) -> Panel:
    """A panel of medians and half ranges over seeds; `series`: label -> x -> seeds."""

    def over_seeds(reduce: Callable) -> dict[str, list[float]]:
        return {m: [float(reduce(found)) for found in by] for m, by in series.items()}

    spreads = over_seeds(lambda found: np.ptp(found) / 2)
    return Panel(title, y_label, x, over_seeds(np.median), spreads, **options)


def measured_rows(rows: Rows, at: str) -> list[dict[str, Any]]:
    """Mean latency and local ratio of every method."""
    return [
        row
        for method, by_seed in rows.items()
        for row in (
            median_row(method, f"mean latency, {at}", values(by_seed)),
            median_row(method, f"local ratio, {at}", values(by_seed, LOCAL), "1"),
        )
    ]


def ratio_rows(
    rows: Rows, pairs: Sequence[tuple[str, str]], at: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Metrics of (method, over) latency ratios, and `method to over` -> change."""
    found = {pair: ratio(rows, *pair) for pair in pairs}
    metrics = [
        median_row(method, f"latency over {over}, {at}", values_S, "1")
        for (method, over), values_S in found.items()
    ]
    return metrics, {" to ".join(pair): percent(x) for pair, x in found.items()}


def ratio(rows: Rows, method: str, over: str, key: str = MEAN) -> np.ndarray:
    """float64 [seeds]: one method's mean latency over another's, seed by seed."""
    return values(rows[method], key) / values(rows[over], key)


def percent(found: Sequence[float]) -> str:
    """How far a ratio is from 1, such as `-12.3 %`; the median over seeds."""
    return f"{100 * (float(np.median(found)) - 1):+.1f} %"


def percents(ratios: Iterable[Sequence[float]]) -> str:
    """The least and the largest of several changes, such as `-12.3 to -3.4 %`."""
    medians = [100 * (float(np.median(found)) - 1) for found in ratios]
    low, high = min(medians), max(medians)
    return f"{low:+.1f} %" if low == high else f"{low:+.1f} to {high:+.1f} %"


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


def simulated(
    settings: Runs,
    case: Case,
    *,
    workload: Mapping[str, Any] | None = None,
    limits: Sequence[str] = (),
    shapes: Sequence[ModelShape] = (),
    **found,
) -> Findings:
    """Findings of runs in computed time.

    Args:
      settings: of the study; all its fields are told.
      case: one of them; tells model and hardware.
      workload, limits: what is true of this study alone.
      shapes: of all models, where the study has several.
      found: further fields of Findings.
    """
    told = dataclasses.asdict(settings)
    return Findings(
        model=shape_entry(*(shapes or [case.shape])),
        workload={
            "comparable": False,
            "why_not_comparable": REASON,
            "routing": "generated by moe_edge/workload/routing_model.py",
            "arrivals": "poisson",
            "max_batch": LoopOptions().max_batch,
            **{name: told[name] for name in told if name not in ("seed", "seeds")},
            **(workload or {}),
            "hardware": sources(case),
        },
        limits=[*LIMITS, *limits],
        kind="simulated",
        cost_model_source="preset",
        seeds=settings.all_seeds,
        **found,
    )


def study_of(
    name: str,
    question: str,
    settings: type,
    measure: Callable[[Any], Findings],
    *,
    check: Callable[[Any], None] = nothing_to_check,
    **claim,
) -> Study:
    """A study of placement; `claim`: fields of Claim, never comparable."""
    return Study(
        name=name,
        question=question,
        settings=settings,
        measure=measure,
        check=check,
        claim=Claim(**claim, not_comparable=REASON),
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
