"""Prism, figure 8: 4 to 256 GPUs at two rates of arrival, and 100 to 1000 Mbps."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.hardware.clusters import PRISM_MEMORY_SHARE
from moe_edge.metrics.plots_panels import bar_panels
from moe_edge.studies.prism.rows import (
    measured_rows,
    median_row,
    percent,
    percents,
    ratio,
    seed_panel,
    simulated,
    slower,
    stored,
    study_of,
    values,
)
from moe_edge.studies.prism.runs import (
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
    Rows,
    Runs,
    cases_of,
    check_has_prism,
    on_cluster,
    serve_all,
)
from moe_edge.studies.study import Findings

MBPS = 500.0  # of figure 8a, as in the test bed
OURS_UP_TO = 64  # GPUs: beyond, our placer would take most of the study's time
PAPER = {
    "4 to 256 GPUs, arrival 8 s": "-19 %",
    "4 to 256 GPUs, arrival 15 s": "-9 %",
    "100 to 1000 Mbps, 4 GPUs": "over -55 %",
    "100 to 1000 Mbps, 256 GPUs": "-35 %",
}
WHY = (
    "The paper does not say whether a Poisson rate is of a server or of the whole "
    "cluster, how GPUs are grouped, or which requests are asked: here of each server, "
    "servers of 1 + 1 + 2 GPUs repeated, table II's MultiData. With a rate for each "
    "server load and memory of a server stay the same at any size: more servers only "
    "free each other from keeping the only copies of experts. Without the paper's "
    "software overheads the network is nearly all of a latency, so the rate of the "
    "lines counts for more here, at every size."
)


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

    requests_per_server: int = 6
    model: str = "deepseek_v2_lite"
    workload: str = "multidata"
    methods: Sequence[str] = (PRISM, OPTIMUM, OURS)
    gpus: Sequence[int] = (4, 32, 256)
    intervals_s: Sequence[float] = (8.0, 15.0)
    mbps: Sequence[float] = (100.0, 200.0, 500.0, 1000.0)


def place_of(gpus: int, interval_s: float, mbps: float) -> str:
    """A point of the study in words."""
    return f"{gpus} GPUs, arrival {interval_s:g} s, {mbps:g} Mbps"


def measure(settings: Figure8) -> Findings:
    """All sizes at all rates of arrival; all line rates at the longest interval."""
    rows_of: dict[tuple[int, float, float], Rows] = {}
    longest_s, first = max(settings.intervals_s), None
    share = PRISM_MEMORY_SHARE.get(settings.model, 1.0)
    for gpus in settings.gpus:
        for interval_s in settings.intervals_s:
            options = {"num_gpus": gpus}
            cases = cases_of(settings, interval_s=interval_s, cluster_options=options)
            first = first or cases[0][1]
            rates = settings.mbps if interval_s == longest_s else ()
            for mbps in dict.fromkeys((MBPS, *rates)):
                methods = settings.methods if mbps == MBPS else (PRISM,)
                methods = [m for m in methods if m != OURS or gpus <= OURS_UP_TO]
                machines = {"mbps": mbps, "expert_memory_share": share, **options}
                moved = [
                    (s, on_cluster(case, "prism", **machines)) for s, case in cases
                ]
                at = place_of(gpus, interval_s, mbps)
                # Means of each of hundreds of servers would say nothing.
                rows_of[gpus, interval_s, mbps] = {
                    method: [{key: row[key] for key in (MEAN, LOCAL)} for row in rows]
                    for method, rows in serve_all(
                        moved, methods, at, period_s=0.0
                    ).items()
                }
    return findings(settings, rows_of, first)


def change(
    rows_of: Mapping[tuple[int, float, float], Rows], old: tuple, new: tuple
) -> np.ndarray:
    """float64 [seeds]: Prism's mean latency at `new` over that at `old`."""
    return values(rows_of[new][PRISM]) / values(rows_of[old][PRISM])


def findings(settings: Figure8, rows_of, case) -> Findings:
    """The entry from rows of every (GPUs, interval, Mbps)."""
    metrics = []
    for point, rows in rows_of.items():
        metrics += measured_rows(rows, place_of(*point))
    fewest, most = min(settings.gpus), max(settings.gpus)
    low, high = min(settings.mbps), max(settings.mbps)
    longest_s = max(settings.intervals_s)
    sizes = {
        f"{fewest} to {most} GPUs, arrival {interval_s:g} s": change(
            rows_of, (fewest, interval_s, MBPS), (most, interval_s, MBPS)
        )
        for interval_s in settings.intervals_s
    }
    rates = {
        f"{low:g} to {high:g} Mbps, {gpus} GPUs": change(
            rows_of, (gpus, longest_s, low), (gpus, longest_s, high)
        )
        for gpus in settings.gpus
    }
    for name, found in (sizes | rates).items():
        metrics.append(median_row(PRISM, f"latency ratio, {name}", found, "1"))
    ours = {name: percent(found) for name, found in (sizes | rates).items()}
    losers = [
        f"{gpus} GPUs, {interval_s:g} s: {method} {percent(over)}"
        for (gpus, interval_s, mbps), rows in rows_of.items()
        for method in rows
        if method != PRISM
        and slower(over := ratio(rows, method, PRISM)) > len(over) / 2
    ]
    return simulated(
        settings,
        case,
        answer=f"On {settings.workload}, {fewest} to {most} GPUs change the mean "
        f"latency of Prism's placement by {percents(sizes.values())}, and {low:g} to "
        f"{high:g} Mbps by {percents(rates.values())}.",
        details=[
            *(f"{at}: {ours[at]} (paper {PAPER.get(at, 'none')})." for at in ours),
            f"Slower than Prism's placement: {', '.join(losers) or 'nowhere'}.",
        ],
        workload={"migration": "none"},
        metrics=metrics,
        checks={
            "a faster network is faster at every size": all(
                (found < 1).all() for found in rates.values()
            )
        },
        limits=[
            f"{settings.requests_per_server} requests a server: too few for long "
            "queues to build up.",
            f"Our placer was run up to {OURS_UP_TO} GPUs here.",
        ],
        ours=ours,
        plot=lambda path: plot_sizes(path, settings, rows_of),
        summary={"change": ours},
        files={
            "by_seed.json": stored(
                {
                    f"{gpus} GPUs, {interval_s:g} s, {mbps:g} Mbps": rows
                    for (gpus, interval_s, mbps), rows in rows_of.items()
                }
            )
        },
        pictures={"bandwidth.png": lambda path: plot_rates(path, settings, rows_of)},
    )


def plot_sizes(path, settings: Figure8, rows_of) -> None:
    """A panel a rate of arrival: latency over the number of GPUs."""
    empty = [{MEAN: np.nan}] * settings.seeds
    panels = [
        seed_panel(
            f"a request every {interval_s:g} s at each server",
            "seconds a request",
            [str(gpus) for gpus in settings.gpus],
            {
                method: [
                    values(rows_of[gpus, interval_s, MBPS].get(method, empty))
                    for gpus in settings.gpus
                ]
                for method in settings.methods
                if method in next(iter(rows_of.values()))
            },
            x_label="GPUs",
        )
        for interval_s in settings.intervals_s
    ]
    bar_panels(path, panels, title="Latency over size (simulated)")


def plot_rates(path, settings: Figure8, rows_of) -> None:
    """Prism's latency over the number of GPUs, a bar a line rate."""
    longest_s = max(settings.intervals_s)
    panel = seed_panel(
        f"Prism's placement, a request every {longest_s:g} s at each server",
        "seconds a request",
        [str(gpus) for gpus in settings.gpus],
        {
            f"{mbps:g} Mbps": [
                values(rows_of[gpus, longest_s, mbps][PRISM]) for gpus in settings.gpus
            ]
            for mbps in settings.mbps
        },
        x_label="GPUs",
    )
    bar_panels(path, [panel], title="Latency over the network's rate (simulated)")


STUDY = study_of(
    "prism_fig8",
    "How does latency change with GPUs and with the network (Prism, figure 8)?",
    Figure8,
    measure,
    check=lambda settings: check_has_prism(settings.methods),
    source="Prism, figure 8 and section IV-C",
    paper=PAPER,
    why=WHY,
)
