"""Prism, figure 8: 4 to 256 GPUs at two rates of arrival, and 100 to 1000 Mbps."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.bench.rounds import median_panel
from moe_edge.bench.study import Findings
from moe_edge.hardware.clusters import PRISM_MEMORY_SHARE
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import (
    Runs,
    cases_of,
    check_has_prism,
    on_cluster,
    serve_all,
)
from moe_edge.papers.prism.studies.served import (
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
    median_row,
    percent,
    percents,
    slower,
    stored,
)

MBPS = 500.0  # of figure 8a, as in the test bed
OURS_UP_TO = 64  # GPUs: beyond, our placer would take most of the study's time
PAPER = {
    "4 to 256 GPUs, arrival 8 s": "-19 %",
    "4 to 256 GPUs, arrival 15 s": "-9 %",
    "100 to 1000 Mbps, 4 GPUs": "over -55 %",
    "100 to 1000 Mbps, 256 GPUs": "-35 %",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure8(Runs):
    """The size of the study.

    Attributes:
      model, workload: what is asked.
      methods: what is compared, at 500 Mbps.
      gpus: of all servers together.
      intervals_s: mean seconds between requests of a server.
      mbps: rates of the lines, at the longest interval.
    """

    requests_per_server: int = 16
    model: str = "deepseek_v2_lite"
    workload: str = "multidata"
    methods: Sequence[str] = (PRISM, OPTIMUM, OURS)
    gpus: Sequence[int] = (4, 32, 256)
    intervals_s: Sequence[float] = (8.0, 15.0)
    mbps: Sequence[float] = (100.0, 200.0, 500.0, 1000.0)


class Point(NamedTuple):
    """GPUs in all, seconds between requests of a server, rate of the lines."""

    gpus: int
    interval_s: float
    mbps: float = MBPS

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, arrival {self.interval_s:g} s, {self.mbps:g} Mbps"


Points = Mapping[Point, MethodRuns]


def measure(settings: Figure8) -> Findings:
    """All sizes at all rates of arrival; all line rates at the longest interval."""
    points: dict[Point, MethodRuns] = {}
    first, longest_s = None, max(settings.intervals_s)
    share = PRISM_MEMORY_SHARE.get(settings.model, 1.0)
    for gpus, interval_s in itertools.product(settings.gpus, settings.intervals_s):
        options = {"num_gpus": gpus}
        cases = cases_of(settings, interval_s=interval_s, cluster_options=options)
        first = first or cases[0][1]
        rates = settings.mbps if interval_s == longest_s else ()
        for mbps in dict.fromkeys((MBPS, *rates)):
            methods = settings.methods if mbps == MBPS else (PRISM,)
            methods = [m for m in methods if m != OURS or gpus <= OURS_UP_TO]
            machines = {"mbps": mbps, "expert_memory_share": share, **options}
            moved = [(s, on_cluster(case, "prism", **machines)) for s, case in cases]
            point = Point(gpus, interval_s, mbps)
            served = serve_all(moved, methods, str(point), period_s=0.0)
            # Means of each of hundreds of servers would say nothing.
            points[point] = served.only(MEAN, LOCAL)
    return findings(settings, points, first)


def change(points: Points, old: Point, new: Point) -> np.ndarray:
    """float64 [seeds]: Prism's mean latency at `new` over that at `old`."""
    return points[new].values(PRISM) / points[old].values(PRISM)


def findings(settings: Figure8, points: Points, case) -> Findings:
    """The entry from all points."""
    fewest, most = min(settings.gpus), max(settings.gpus)
    low, high = min(settings.mbps), max(settings.mbps)
    longest_s = max(settings.intervals_s)
    sizes = {
        f"{fewest} to {most} GPUs, arrival {interval_s:g} s": change(
            points, Point(fewest, interval_s), Point(most, interval_s)
        )
        for interval_s in settings.intervals_s
    }
    rates = {
        f"{low:g} to {high:g} Mbps, {gpus} GPUs": change(
            points, Point(gpus, longest_s, low), Point(gpus, longest_s, high)
        )
        for gpus in settings.gpus
    }
    ours = {name: percent(found) for name, found in (sizes | rates).items()}
    losers = [
        f"{point.gpus} GPUs, {point.interval_s:g} s: {method} {percent(over)}"
        for point, served in points.items()
        for method in served.rows
        if method != PRISM
        and slower(over := served.ratio(method, PRISM)) > len(over) / 2
    ]
    return simulated(
        settings,
        [case],
        answer=f"On {settings.workload}, {fewest} to {most} GPUs change the mean "
        f"latency of Prism's placement by {percents(sizes.values())}, and {low:g} to "
        f"{high:g} Mbps by {percents(rates.values())}.",
        details=[
            *(f"{at}: {ours[at]} (paper {PAPER.get(at, 'none')})." for at in ours),
            f"Slower than Prism's placement: {', '.join(losers) or 'nowhere'}.",
        ],
        workload={"migration": "none"},
        metrics=[
            *(row for at, served in points.items() for row in served.metrics(str(at))),
            *(
                median_row(PRISM, f"latency ratio, {name}", found, "1")
                for name, found in (sizes | rates).items()
            ),
        ],
        checks={
            "a faster network is faster at every size": all(
                (found < 1).all() for found in rates.values()
            )
        },
        limits=[
            f"{settings.requests_per_server} requests a server.",
            f"Our placer was run up to {OURS_UP_TO} GPUs here.",
        ],
        ours=ours,
        plot=lambda path: plot_sizes(path, settings, points),
        summary={"change": ours},
        files=stored(
            {str(at).replace("arrival ", ""): served for at, served in points.items()}
        ),
        pictures={"bandwidth.png": lambda path: plot_rates(path, settings, points)},
    )


def plot_sizes(path, settings: Figure8, points: Points) -> None:
    """A panel a rate of arrival: latency over the number of GPUs."""
    panels = []
    for interval_s in settings.intervals_s:
        by_gpus = [points[Point(gpus, interval_s)] for gpus in settings.gpus]
        nothing = [np.nan] * settings.seeds
        series = {
            method: [
                served.values(method) if method in served.rows else nothing
                for served in by_gpus
            ]
            for method in next(iter(points.values())).rows
        }
        title = f"a request every {interval_s:g} s at each server"
        panels.append(panel_over_gpus(title, settings, series))
    draw_panels(path, panels, title="Latency over size (simulated)")


def plot_rates(path, settings: Figure8, points: Points) -> None:
    """Prism's latency over the number of GPUs, a bar a line rate."""
    longest_s = max(settings.intervals_s)
    series = {
        f"{mbps:g} Mbps": [
            points[Point(gpus, longest_s, mbps)].values(PRISM) for gpus in settings.gpus
        ]
        for mbps in settings.mbps
    }
    title = f"Prism's placement, a request every {longest_s:g} s at each server"
    panel = panel_over_gpus(title, settings, series)
    draw_panels(path, [panel], title="Latency over the network's rate (simulated)")


def panel_over_gpus(title: str, settings: Figure8, series) -> Panel:
    """Latencies; `series`: label -> number of GPUs -> seeds."""
    x = [str(gpus) for gpus in settings.gpus]
    return median_panel(title, "seconds a request", x, series, x_label="GPUs")


STUDY = study_of(
    name="prism_fig8",
    question="How does latency change with GPUs and with the network (Prism, "
    "figure 8)?",
    settings=Figure8,
    measure=measure,
    check=lambda settings: check_has_prism(settings.methods),
    source="Prism, figure 8 and section IV-C",
    paper=PAPER,
    why="The paper does not say whether a Poisson rate is of a server or of the whole "
    "cluster, how GPUs are grouped, or which requests are asked: here of each server, "
    "servers of 1 + 1 + 2 GPUs repeated, table II's MultiData. With a rate for each "
    "server load and memory of a server stay the same at any size: more servers only "
    "free each other from keeping the only copies of experts. Without the paper's "
    "software overheads the network is nearly all of a latency, so the rate of the "
    "lines counts for more here, at every size.",
)
