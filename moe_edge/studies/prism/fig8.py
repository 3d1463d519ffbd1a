"""Prism, figure 8: 4 to 256 GPUs at two rates of arrival, and 100 to 1000 Mbps."""

from collections.abc import Mapping

import numpy as np

from moe_edge.hardware.clusters import PRISM_MEMORY_SHARE
from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.studies.prism.runs import (
    LOCAL,
    MEAN,
    Rows,
    cases_of,
    median_row,
    on_cluster,
    percent,
    prism_claim,
    ratio,
    serve,
    shape_entry,
    slower,
    stored,
    values,
    workload_entry,
)
from moe_edge.studies.prism.settings import (
    LIMITS,
    OURS,
    PRISM,
    PrismFindings,
    PrismSettings,
)

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


def run(settings: PrismSettings) -> tuple[dict, PrismFindings]:
    """All sizes at all rates of arrival; all line rates at the longest interval."""
    rows_of: dict[tuple[int, float, float], Rows] = {}
    calm_s, first = max(settings.intervals), None
    share = PRISM_MEMORY_SHARE.get(settings.model, 1.0)
    for gpus in settings.gpus:
        for interval_s in settings.intervals:
            options = {"num_gpus": gpus}
            cases = cases_of(settings, interval_s=interval_s, cluster_options=options)
            first = first or cases[0][1]
            rates = settings.mbps if interval_s == calm_s else ()
            for mbps in dict.fromkeys((MBPS, *rates)):
                methods = settings.methods if mbps == MBPS else (PRISM,)
                methods = [m for m in methods if m != OURS or gpus <= OURS_UP_TO]
                found = rows_of[gpus, interval_s, mbps] = {m: [] for m in methods}
                for seed, case in cases:
                    moved = on_cluster(
                        *(case, "prism"),
                        num_gpus=gpus,
                        mbps=mbps,
                        expert_memory_share=share,
                    )
                    for method in methods:
                        row = serve(moved, method, seed, period_s=0.0).row()
                        # Means of each of hundreds of servers would say nothing.
                        found[method].append({key: row[key] for key in (MEAN, LOCAL)})
                told = {
                    m: round(float(np.median(values(r))), 4) for m, r in found.items()
                }
                print(
                    f"{gpus} GPUs, {interval_s:g} s, {mbps:g} Mbps: {told}", flush=True
                )
    return shape_entry(first.shape), findings(settings, rows_of, first)


def change(
    rows_of: Mapping[tuple[int, float, float], Rows], old: tuple, new: tuple
) -> np.ndarray:
    """float64 [seeds]: Prism's mean latency at `new` over that at `old`."""
    return values(rows_of[new][PRISM]) / values(rows_of[old][PRISM])


def findings(settings: PrismSettings, rows_of, case) -> PrismFindings:
    """The entry from rows of every (GPUs, interval, Mbps)."""
    metrics, ours = [], {}
    for (gpus, interval_s, mbps), rows in rows_of.items():
        at = f"{gpus} GPUs, arrival {interval_s:g} s, {mbps:g} Mbps"
        for method, by_seed in rows.items():
            metrics += [
                median_row(method, f"mean latency, {at}", values(by_seed)),
                median_row(method, f"local ratio, {at}", values(by_seed, LOCAL), "1"),
            ]
    fewest, most = min(settings.gpus), max(settings.gpus)
    low, high = min(settings.mbps), max(settings.mbps)
    calm_s = max(settings.intervals)
    pairs = {
        f"{fewest} to {most} GPUs, arrival {interval_s:g} s": (
            (fewest, interval_s, MBPS),
            (most, interval_s, MBPS),
        )
        for interval_s in settings.intervals
    } | {
        f"{low:g} to {high:g} Mbps, {gpus} GPUs": (
            (gpus, calm_s, low),
            (gpus, calm_s, high),
        )
        for gpus in settings.gpus
    }
    for name, (old, new) in pairs.items():
        found = change(rows_of, old, new)
        metrics.append(median_row(PRISM, f"latency ratio, {name}", found, "1"))
        ours[name] = percent(found)
    parts = [f"{name}: {ours[name]} (paper {PAPER.get(name, 'none')})" for name in ours]
    losers = [
        f"{gpus} GPUs, {interval_s:g} s: {method} {percent(over)}"
        for (gpus, interval_s, mbps), rows in rows_of.items()
        for method in rows
        if method != PRISM
        and slower(over := ratio(rows, method, PRISM)) > len(over) / 2
    ]
    faster = all(
        (change(rows_of, (gpus, calm_s, low), (gpus, calm_s, high)) < 1).all()
        for gpus in settings.gpus
    )
    entry = {
        "question": "How does latency change with GPUs and with the network (Prism, "
        "figure 8)?",
        "answer": f"Prism's placement on {settings.workload}: {'; '.join(parts)}. "
        f"Slower than Prism's placement: {', '.join(losers) or 'nowhere'}.",
        "workload": workload_entry(
            settings,
            case,
            workload=settings.workload,
            gpus=list(settings.gpus),
            intervals_s=list(settings.intervals),
            mbps=list(settings.mbps),
            migration="none",
        ),
        "metrics": metrics,
        "baselines": [],
        "checks": {"a faster network is faster at every size": faster},
        "limits": [
            *LIMITS,
            f"{settings.requests_per_server} requests a server: too few for long "
            "queues to build up.",
            f"Our placer was run up to {OURS_UP_TO} GPUs here.",
        ],
        "paper_claim": prism_claim(
            "Prism, figure 8 and section IV-C", PAPER, ours, WHY
        ),
    }
    texts = {
        f"{gpus} GPUs, {interval_s:g} s, {mbps:g} Mbps": rows
        for (gpus, interval_s, mbps), rows in rows_of.items()
    }
    return PrismFindings(
        entry=entry,
        plot=lambda path: plot_sizes(path, settings, rows_of),
        summary={"change": ours},
        files={"by_seed.json": stored(texts)},
        pictures={"bandwidth.png": lambda path: plot_rates(path, settings, rows_of)},
    )


def plot_sizes(path, settings: PrismSettings, rows_of) -> None:
    """A panel a rate of arrival: latency over the number of GPUs."""
    methods = [m for m in settings.methods if m in rows_of[next(iter(rows_of))]]

    def all_of(reduce, interval_s):
        empty = [{MEAN: np.nan}] * settings.seeds
        return {
            method: [
                float(reduce(values(rows_of[g, interval_s, MBPS].get(method, empty))))
                for g in settings.gpus
            ]
            for method in methods
        }

    panels = [
        Panel(
            f"a request every {interval_s:g} s at each server",
            "seconds a request",
            [str(gpus) for gpus in settings.gpus],
            all_of(np.median, interval_s),
            all_of(lambda found: np.ptp(found) / 2, interval_s),
            x_label="GPUs",
        )
        for interval_s in settings.intervals
    ]
    bar_panels(path, panels, title="Latency over size (simulated)")


def plot_rates(path, settings: PrismSettings, rows_of) -> None:
    """Prism's latency over the number of GPUs, a bar a line rate."""
    calm_s = max(settings.intervals)

    def all_of(reduce):
        return {
            f"{mbps:g} Mbps": [
                float(reduce(values(rows_of[gpus, calm_s, mbps][PRISM])))
                for gpus in settings.gpus
            ]
            for mbps in settings.mbps
        }

    panel = Panel(
        f"Prism's placement, a request every {calm_s:g} s at each server",
        "seconds a request",
        [str(gpus) for gpus in settings.gpus],
        all_of(np.median),
        all_of(lambda found: np.ptp(found) / 2),
        x_label="GPUs",
    )
    bar_panels(path, [panel], title="Latency over the network's rate (simulated)")
