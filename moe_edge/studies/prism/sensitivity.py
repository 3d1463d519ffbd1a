"""How skew, memory and the number of copies change who places best."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.metrics.plots_panels import bar_panels
from moe_edge.simulate.cluster.case import Case
from moe_edge.studies.prism.rows import (
    measured_rows,
    percent,
    percents,
    ratio,
    ratio_rows,
    seed_panel,
    simulated,
    stored,
    study_of,
    values,
    worse_than,
)
from moe_edge.studies.prism.runs import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    Rows,
    Runs,
    cases_of,
    on_cluster,
    serve_all,
)
from moe_edge.studies.study import Findings

CLUSTERS = ("prism", "mixed")
BASE_SHARE = {"prism": 0.3, "mixed": 0.6}  # 1.7 copies of DeepSeek-V2-Lite on both
WHY = (
    "The paper varies none of these. Skew multiplies what sets a domain apart from the "
    "others (1: as fitted, narrow tasks as assumed); memory is for experts, in copies "
    "of the model that all servers hold together; more servers of the same memory are "
    "more copies at the same memory of each."
)


METHODS = (EPLB, PRISM, OPTIMUM, OURS)
PAIRS = (
    *((OURS, EPLB), (OURS, PRISM), (OURS, OPTIMUM)),
    *((OPTIMUM, EPLB), (OPTIMUM, PRISM), (PRISM, EPLB)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity(Runs):
    """The size of the study.

    Attributes:
      model, workload, interval_s: what is asked, how often at each server.
      skews: factors on what sets the domains apart.
      memory_shares: of a GPU's memory, for experts, on the mixed cluster.
      gpus: of all servers together.
    """

    requests_per_server: int = 40
    model: str = "deepseek_v2_lite"
    workload: str = "bigbench"
    interval_s: float = 10.0
    skews: Sequence[float] = (0.5, 1.0, 2.0)
    memory_shares: Sequence[float] = (0.4, 0.5, 0.6, 0.8)
    gpus: Sequence[int] = (4, 16)


class Point(NamedTuple):
    """What was varied, where, and the label of the value."""

    study: str
    cluster: str
    value: str


def copies(case: Case) -> float:
    """How many copies of the model's experts the cluster has room for."""
    slots = case.cost_model.cluster.slots(case.shape.block.num_bytes)
    return float(sum(one.sum() for one in slots)) / case.shape.num_blocks


def measure(settings: Sensitivity) -> Findings:
    """Every skew, memory and number of servers; static placements."""
    found: dict[Point, Rows] = {}
    base = None

    def add(study: str, cluster: str, value: str | None, cases, share=None) -> None:
        if share is not None:
            options = {"expert_memory_share": share}
            cases = [(s, on_cluster(case, cluster, **options)) for s, case in cases]
        value = value or f"{copies(cases[0][1]):.2f}"
        point = Point(study, cluster, value)
        found[point] = serve_all(cases, METHODS, " ".join(point), period_s=0.0)

    for skew in settings.skews:
        cases = cases_of(settings, skew=skew)
        base = cases if base is None or skew == 1.0 else base
        for name in CLUSTERS:
            add("skew", name, f"{skew:g}", cases, BASE_SHARE[name])
    for name in CLUSTERS:
        for relative in settings.memory_shares:
            # Shares are of the base: both clusters hold alike.
            share = round(BASE_SHARE[name] * relative / BASE_SHARE["mixed"], 6)
            add("memory", name, None, base, share)
    for gpus in settings.gpus:
        cases = cases_of(settings, cluster_options={"num_gpus": gpus})
        add("copies", "prism", f"{copies(cases[0][1]):.1f}", cases)
    return findings(settings, found, base[0][1])


def findings(
    settings: Sensitivity, found: Mapping[Point, Rows], case: Case
) -> Findings:
    """The entry from rows at every point."""
    metrics, ours, details = [], {}, []
    for point, rows in found.items():
        at = f"{point.study} {point.value}, {point.cluster} cluster"
        more, ours[at] = ratio_rows(rows, PAIRS, at)
        metrics += measured_rows(rows, at) + more
    for study, cluster in dict.fromkeys(point[:2] for point in found):
        these = [p for p in found if p[:2] == (study, cluster)]
        spans = [
            f"{method} to {over} {span(found, these, method, over)}"
            for method, over in ((OURS, EPLB), (OURS, OPTIMUM), (PRISM, EPLB))
        ]
        ends = f"{these[0].value} to {these[-1].value}"
        details.append(
            f"Mean latency, {study} {ends} ({cluster} cluster): {', '.join(spans)}."
        )
    lost = worse_than(
        {f"{p.study} {p.value} ({p.cluster})": rows for p, rows in found.items()}
    )
    over = {
        other: percents(ratio(rows, OURS, other) for rows in found.values())
        for other in (EPLB, OPTIMUM)
    }
    return simulated(
        settings,
        case,
        answer="Over all skews, memories and numbers of copies our placer's mean "
        f"latency is {over[EPLB]} against heterogeneous EPLB's and {over[OPTIMUM]} "
        "against that of the optimum of eq. 2.",
        details=details,
        workload={"base_memory_share": BASE_SHARE, "migration": "none"},
        metrics=metrics,
        baselines=[EPLB, PRISM],
        checks={
            "more memory is never slower than least, for the optimum": more_is_faster(
                found
            )
        },
        limits=[lost],
        ours=ours,
        plot=lambda path: plot(path, found),
        summary={"change": ours},
        files={"by_seed.json": stored({" ".join(p): r for p, r in found.items()})},
    )


def span(found, points, method: str, over: str) -> str:
    """The change at the first and the last of some points."""
    ends = [percent(ratio(found[point], method, over)) for point in points]
    return f"{ends[0]} to {ends[-1]}"


def more_is_faster(found: Mapping[Point, Rows]) -> bool:
    """The optimum at the most memory is no slower than at the least, everywhere."""
    for cluster in CLUSTERS:
        these = [p for p in found if p[:2] == ("memory", cluster)]
        least = min(these, key=lambda p: float(p.value))
        most = max(these, key=lambda p: float(p.value))
        if np.median(values(found[most][OPTIMUM])) > np.median(
            values(found[least][OPTIMUM])
        ):
            return False
    return True


LABELS = {
    "skew": "skew of the domains",
    "memory": "copies of the model in the memory of all",
    "copies": "copies of the model, more servers",
}


def plot(path, found: Mapping[Point, Rows]) -> None:
    """Latency over heterogeneous EPLB's at every point."""
    panels = []
    for study, cluster in dict.fromkeys(point[:2] for point in found):
        these = [p for p in found if p[:2] == (study, cluster)]
        panels.append(
            seed_panel(
                f"{LABELS[study]} ({cluster})",
                "latency over EPLB's",
                [p.value for p in these],
                {
                    m: [ratio(found[p], m, EPLB) for p in these]
                    for m in METHODS
                    if m != EPLB
                },
                level=("heterogeneous EPLB", 1.0),
            )
        )
    bar_panels(path, panels, title="Sensitivity of placements (simulated)")


STUDY = study_of(
    "prism_sensitivity",
    "How do skew, memory and the number of copies change who places best?",
    Sensitivity,
    measure,
    source="none: not in the paper",
    paper={},
    why=WHY,
)
