"""How skew, memory and the number of copies change who places best."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_edge.bench.rounds import median_panel
from moe_edge.bench.study import Findings
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import Runs, cases_of, on_cluster, serve_all
from moe_edge.papers.prism.studies.served import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
    percents,
    stored,
    worse_than,
)
from moe_edge.simulate.cluster.scenario import Scenario

BASE_SHARE = {"prism": 0.3, "mixed": 0.6}  # 1.7 copies of DeepSeek-V2-Lite on both
LABELS = {
    "skew": "skew of the domains",
    "memory": "copies of the model in the memory of all",
    "copies": "copies of the model, more servers",
}
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


Points = Mapping[Point, MethodRuns]


def copies(case: Scenario) -> float:
    """How many copies of the model's experts the cluster has room for."""
    slots = case.cost_model.cluster.slots(case.shape.block.num_bytes)
    return float(sum(one.sum() for one in slots)) / case.shape.num_blocks


def measure(settings: Sensitivity) -> Findings:
    """Every skew, memory and number of servers; static placements."""
    points: dict[Point, MethodRuns] = {}
    base = None

    def add(study: str, cluster: str, value: str | None, cases, share=None) -> None:
        if share is not None:
            options = {"expert_memory_share": share}
            cases = [(s, on_cluster(case, cluster, **options)) for s, case in cases]
        point = Point(study, cluster, value or f"{copies(cases[0][1]):.2f}")
        points[point] = serve_all(cases, METHODS, " ".join(point), period_s=0.0)

    for skew in settings.skews:
        cases = cases_of(settings, skew=skew)
        base = cases if base is None or skew == 1.0 else base
        for name, share in BASE_SHARE.items():
            add("skew", name, f"{skew:g}", cases, share)
    for name, share in BASE_SHARE.items():
        for relative in settings.memory_shares:
            # Shares are of the base: both clusters hold alike.
            alike = round(share * relative / BASE_SHARE["mixed"], 6)
            add("memory", name, None, base, alike)
    for gpus in settings.gpus:
        cases = cases_of(settings, cluster_options={"num_gpus": gpus})
        add("copies", "prism", f"{copies(cases[0][1]):.1f}", cases)
    return findings(settings, points, base[0][1])


def rows_of(points: Points) -> dict[tuple[str, str], dict[str, MethodRuns]]:
    """(study, cluster) -> value -> what was served, in the order of the points."""
    found: dict[tuple[str, str], dict[str, MethodRuns]] = {}
    for (study, cluster, value), served in points.items():
        found.setdefault((study, cluster), {})[value] = served
    return found


def findings(settings: Sensitivity, points: Points, case: Scenario) -> Findings:
    """The entry from all points."""
    metrics, ours, details = [], {}, []
    for (study, cluster, value), served in points.items():
        at = f"{study} {value}, {cluster} cluster"
        metrics += served.metrics(at, PAIRS)
        ours[at] = served.changes(PAIRS)
    for (study, cluster), by_value in rows_of(points).items():
        values, served = [*by_value], [*by_value.values()]
        spans = [
            f"{m} to {n} {served[0].change(m, n)} to {served[-1].change(m, n)}"
            for m, n in ((OURS, EPLB), (OURS, OPTIMUM), (PRISM, EPLB))
        ]
        details.append(
            f"Mean latency, {study} {values[0]} to {values[-1]} ({cluster} cluster): "
            f"{', '.join(spans)}."
        )
    over = {
        other: percents(served.ratio(OURS, other) for served in points.values())
        for other in (EPLB, OPTIMUM)
    }
    return simulated(
        settings,
        [case],
        answer="Over all skews, memories and numbers of copies our placer's mean "
        f"latency is {over[EPLB]} against heterogeneous EPLB's and {over[OPTIMUM]} "
        "against that of the optimum of eq. 2.",
        details=details,
        workload={"base_memory_share": BASE_SHARE, "migration": "none"},
        metrics=metrics,
        baselines=[EPLB, PRISM],
        checks={
            "more memory is never slower than least, for the optimum": all(
                more_is_faster(by_value)
                for (study, _), by_value in rows_of(points).items()
                if study == "memory"
            )
        },
        limits=[
            worse_than(
                {f"{p.study} {p.value} ({p.cluster})": points[p] for p in points}
            )
        ],
        ours=ours,
        plot=lambda path: plot(path, points),
        summary={"change": ours},
        files=stored({" ".join(point): served for point, served in points.items()}),
    )


def more_is_faster(by_memory: Mapping[str, MethodRuns]) -> bool:
    """The optimum at the most memory is no slower than at the least."""
    least, most = (by_memory[end(by_memory, key=float)] for end in (min, max))
    return most.median(OPTIMUM) <= least.median(OPTIMUM)


def plot(path, points: Points) -> None:
    """Latency over heterogeneous EPLB's at every point."""
    panels = [
        median_panel(
            f"{LABELS[study]} ({cluster})",
            "latency over EPLB's",
            list(by_value),
            {
                method: [served.ratio(method, EPLB) for served in by_value.values()]
                for method in METHODS
                if method != EPLB
            },
            level=("heterogeneous EPLB", 1.0),
        )
        for (study, cluster), by_value in rows_of(points).items()
    ]
    draw_panels(path, panels, title="Sensitivity of placements (simulated)")


STUDY = study_of(
    name="prism_sensitivity",
    question="How do skew, memory and the number of copies change who places best?",
    settings=Sensitivity,
    measure=measure,
    source="none: not in the paper",
    paper={},
    why="The paper varies none of these. Skew multiplies what sets a domain apart from "
    "the others (1: as fitted, narrow tasks as assumed); memory is for experts, in "
    "copies of the model that all servers hold together; more servers of the same "
    "memory are more copies at the same memory of each.",
)
