"""How skew, memory and the number of copies change who places best."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.simulate.cluster.case import Case
from moe_edge.studies.prism.runs import (
    LOCAL,
    Rows,
    cases_of,
    median_row,
    on_cluster,
    percent,
    prism_claim,
    ratio,
    serve_all,
    shape_entry,
    stored,
    values,
    workload_entry,
    worse_than,
)
from moe_edge.studies.prism.settings import (
    EPLB,
    LIMITS,
    OPTIMUM,
    OURS,
    PRISM,
    PrismFindings,
    PrismSettings,
)

CLUSTERS = ("prism", "mixed")
BASE_SHARE = {"prism": 0.3, "mixed": 0.6}  # 1.7 copies of DeepSeek-V2-Lite on both
WHY = (
    "The paper varies none of these. Skew multiplies what sets a domain apart from the "
    "others (1: as fitted, narrow tasks as assumed); memory is for experts, in copies "
    "of the model that all servers hold together; more servers of the same memory are "
    "more copies at the same memory of each."
)


class Point(NamedTuple):
    """What was varied, where, and the label of the value."""

    study: str
    cluster: str
    value: str


def copies(case: Case) -> float:
    """How many copies of the model's experts the cluster has room for."""
    slots = case.cost_model.cluster.slots(case.shape.block.num_bytes)
    return float(sum(one.sum() for one in slots)) / case.shape.num_blocks


def run(settings: PrismSettings) -> tuple[dict, PrismFindings]:
    """Every skew, memory and number of servers; static placements."""
    found: dict[Point, Rows] = {}
    base = None

    def add(study: str, cluster: str, value: str, cases) -> None:
        point = Point(study, cluster, value)
        found[point] = serve_all(cases, settings.methods, " ".join(point), period_s=0.0)

    for skew in settings.skews:
        cases = cases_of(settings, skew=skew)
        base = cases if base is None or skew == 1.0 else base
        for name in CLUSTERS:
            share = BASE_SHARE[name]
            moved = [
                (seed, on_cluster(case, name, expert_memory_share=share))
                for seed, case in cases
            ]
            add("skew", name, f"{skew:g}", moved)
    for name in CLUSTERS:
        for relative in settings.memory_shares:
            # Shares are of the base: both clusters hold alike.
            share = round(BASE_SHARE[name] * relative / BASE_SHARE["mixed"], 6)
            moved = [
                (seed, on_cluster(case, name, expert_memory_share=share))
                for seed, case in base
            ]
            add("memory", name, f"{copies(moved[0][1]):.2f}", moved)
    for gpus in settings.gpus:
        cases = cases_of(settings, cluster_options={"num_gpus": gpus})
        add("copies", "prism", f"{copies(cases[0][1]):.1f}", cases)
    case = base[0][1]
    return shape_entry(case.shape), findings(settings, found, case)


def findings(
    settings: PrismSettings, found: Mapping[Point, Rows], case: Case
) -> PrismFindings:
    """The entry from rows at every point."""
    metrics, ours, sentences = [], {}, []
    pairs = ((OURS, EPLB), (OURS, PRISM), (OURS, OPTIMUM))
    pairs += ((OPTIMUM, EPLB), (OPTIMUM, PRISM), (PRISM, EPLB))
    for point, rows in found.items():
        at = f"{point.study} {point.value}, {point.cluster} cluster"
        for method, by_seed in rows.items():
            metrics += [
                median_row(method, f"mean latency, {at}", values(by_seed)),
                median_row(method, f"local ratio, {at}", values(by_seed, LOCAL), "1"),
            ]
        ours[at] = {}
        for method, over in pairs:
            over_S = ratio(rows, method, over)
            metrics.append(
                median_row(method, f"latency over {over}, {at}", over_S, "1")
            )
            ours[at][f"{method} to {over}"] = percent(over_S)
    for study, cluster in dict.fromkeys(point[:2] for point in found):
        these = [p for p in found if p[:2] == (study, cluster)]
        spans = [
            f"{method} to {over} {span(found, these, method, over)}"
            for method, over in ((OURS, EPLB), (OURS, OPTIMUM), (PRISM, EPLB))
        ]
        ends = f"{these[0].value} to {these[-1].value}"
        sentences.append(f"{study} {ends} ({cluster} cluster): {', '.join(spans)}")
    lost = worse_than(
        {f"{p.study} {p.value} ({p.cluster})": rows for p, rows in found.items()}
    )
    entry = {
        "question": "How do skew, memory and the number of copies change who places "
        "best?",
        "answer": f"Mean latency from first to last: {'; '.join(sentences)}.",
        "workload": workload_entry(
            settings,
            case,
            workload=settings.workload,
            interval_s=settings.interval_s,
            skews=list(settings.skews),
            base_memory_share=BASE_SHARE,
            gpus=list(settings.gpus),
            migration="none",
        ),
        "metrics": metrics,
        "baselines": [EPLB, PRISM],
        "checks": {
            "more memory is never slower than least, for the optimum": more_is_faster(
                found
            )
        },
        "limits": [*LIMITS, lost],
        "paper_claim": prism_claim("none: not in the paper", {}, ours, WHY),
    }
    return PrismFindings(
        entry=entry,
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
        methods = [m for m in found[these[0]] if m != EPLB]
        over = {m: [ratio(found[p], m, EPLB) for p in these] for m in methods}
        panels.append(
            Panel(
                f"{LABELS[study]} ({cluster})",
                "latency over EPLB's",
                [p.value for p in these],
                {m: [float(np.median(x)) for x in xs] for m, xs in over.items()},
                {m: [float(np.ptp(x)) / 2 for x in xs] for m, xs in over.items()},
                level=("heterogeneous EPLB", 1.0),
            )
        )
    bar_panels(path, panels, title="Sensitivity of placements (simulated)")
