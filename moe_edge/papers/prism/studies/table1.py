"""Prism, table I: serving alone against serving together."""

import dataclasses
from collections.abc import Mapping, Sequence

from moe_edge.bench.study import Findings
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import Runs, cases_of, serve_all
from moe_edge.papers.prism.studies.served import MethodRuns, median_row, percent, stored

ALONE = "moe_infinity"
# Seconds on servers 1, 2, 3 and the mean over all.
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

    model: str = "mixtral_8x7b"
    workload: str = "bigbench"
    interval_s: float = 10.0
    methods: Sequence[str] = (
        "moe_infinity",
        "moe_infinity_lb",
        "uniform",
        "redundance",
    )


def metrics_of(served: MethodRuns) -> list[dict]:
    """Latencies server by server and over all, and what else methods count."""
    rows = []
    for method, by_seed in served.rows.items():
        for n in range(len(by_seed[0]["latency_s_N"])):
            found = [row["latency_s_N"][n] for row in by_seed]
            rows.append(median_row(method, f"mean latency, server {n + 1}", found))
        rows.append(median_row(method, "mean latency", served.values(method)))
        for key, unit in (("hit_ratio", "1"), ("redirected", "requests")):
            if all(row.get(key) is not None for row in by_seed):
                found = served.values(method, key)
                rows.append(median_row(method, key.replace("_", " "), found, unit))
    return rows


def changes_of(served: MethodRuns) -> dict[str, str]:
    """By method, the change of mean latency against serving alone."""
    others = [m for m in served.rows if ALONE in served.rows and m != ALONE]
    return {method: served.change(method, ALONE) for method in others}


def beside(changes: Mapping[str, str]) -> str:
    """Our changes beside the paper's."""
    paper = {m: percent([row[3] / TABLE_1[ALONE][3]]) for m, row in TABLE_1.items()}
    return ", ".join(
        f"{method} {change} (paper {paper.get(method, 'none')})"
        for method, change in changes.items()
    )


def panels_of(kind: str, ours: Mapping[str, Sequence[float]]) -> list[Panel]:
    """Our seconds and the paper's."""
    places = [*(f"server {n + 1}" for n in range(3)), "all"]
    return [
        Panel(f"ours, {kind}", "seconds a request", places, ours),
        Panel("paper", "seconds a request", places, TABLE_1),
    ]


def measure(settings: Table1) -> Findings:
    """Serving alone, with requests passed on, and random experts together."""
    cases = cases_of(settings)
    served = serve_all(cases, settings.methods, "table I", period_s=0.0)
    ours, changes = served.cells(), changes_of(served)
    return simulated(
        settings,
        [cases[0][1]],
        answer=f"Mean latency against {ALONE} on {settings.model}: {beside(changes)}.",
        workload={"migration": "none"},
        metrics=metrics_of(served),
        baselines=[ALONE],
        checks={"every request was served once": served.is_complete()},
        ours=ours,
        plot=lambda path: draw_panels(
            path,
            panels_of("simulated", ours),
            title="Serving alone and together (simulated)",
        ),
        summary={"change": changes},
        files=stored({"table I": served}),
    )


STUDY = study_of(
    name="prism_table1",
    question="Does sharing experts beat serving alone (Prism, table I)?",
    settings=Table1,
    measure=measure,
    source="Prism, table I",
    paper=TABLE_1,
    why="Which task each server has is not said; here in the order of section IV-A. A "
    "server that serves alone waits for the host link (25 GB/s here), the paper's for "
    "MoE-Infinity's whole offloading path; naive collaboration waits for 500 Mbps and, "
    "in the paper, for software too, so what is ahead depends on these two rates.",
)
