"""Prism, table I: serving alone against serving together, by measured usage of experts;
then for tasks that are assumed to be narrower."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import (
    ASSUMED,
    MEASURED,
    USAGE,
    Method,
    Model,
    Runs,
    Workload,
    cases_of,
    serve_all,
)
from moe_edge.papers.prism.studies.served import MethodRuns, stored

ALONE = "moe_infinity"
# The paper's seconds on servers 1, 2, 3 and the mean over all.
TABLE_1 = {
    "moe_infinity": (9.14, 4.77, 3.18, 5.19),
    "moe_infinity_lb": (8.60, 4.77, 3.10, 5.03),
    "uniform": (4.96, 4.34, 3.40, 4.11),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1(Runs):
    """The size of the study.

    Attributes:
      model, workload, interval_s: what is asked, how often at each server.
      methods: what is compared.
    """

    model: Model = "mixtral_8x7b"
    workload: Workload = "bigbench"
    interval_s: Positive = 10.0
    methods: Sequence[Method] = (
        *("moe_infinity", "moe_infinity_lb", "uniform", "redundance"),
    )


def tell_methods(rows: Rows, served: MethodRuns, **counts: str) -> None:
    """Adds seconds server by server and over all, and what methods count.

    Args:
      counts: measure -> key of `ClusterResult.row`, where all seeds have it.
    """
    for method, by_seed in served.rows.items():
        for n in range(len(by_seed[0]["latency_s_N"])):
            found = [row["latency_s_N"][n] for row in by_seed]
            seconds = of_seeds(found)
            rows("servers", f"server {n + 1}", method, seconds=seconds)
        rows("servers", "all", method, seconds=of_seeds(served.values(method)))
        found = {}
        if method != ALONE and ALONE in served.rows:
            found["over_alone"] = of_seeds(served.ratio(method, ALONE))
        for name, key in counts.items():
            if all(row.get(key) is not None for row in by_seed):
                found[name] = of_seeds(served.values(method, key))
        rows("methods", method, **found)
    rows.files |= stored({"table I": served})


def measure(settings: Table1, rows: Rows) -> None:
    """Serving alone, with requests passed on, and random experts together."""
    cases, narrow = cases_of(settings, **MEASURED), cases_of(settings, **ASSUMED)
    served = serve_all(cases, settings.methods, "table I", period_s=0.0)
    tell_methods(rows, served, hit_ratio="hit_ratio", redirected="redirected")
    assumed = serve_all(narrow, settings.methods, "narrow tasks", period_s=0.0)
    for method in assumed.rows:
        if method != ALONE and ALONE in assumed.rows:
            change = of_seeds(assumed.ratio(method, ALONE) - 1)
            rows("assumed", method, change=change)
    rows.files |= stored({"table I": served, "table I, assumed tasks": assumed})
    complete = served.is_complete() and assumed.is_complete()
    rows.checks["every request was served once"] = complete
    more = {"migration": "none"} | USAGE
    tell(rows, settings, [cases[0][1]], more, [ALONE])


def derive(tables: Tables) -> dict[str, Any]:
    """Changes of mean latency against serving alone."""
    methods = tables["methods"]
    methods["change"] = methods.over_alone - 1
    return {"alone": ALONE, "changes": methods[methods.change.notna()]}


FRAMES = {
    "servers": frame("server method", "seconds:s"),
    "methods": frame("method", "over_alone hit_ratio redirected:requests"),
    "assumed": frame("method", "change"),
}
STUDY = Study("prism_table1", Table1, measure, FRAMES, derive)
