"""Prism, figure 6: who computes most at home, over time."""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.studies.prism.runs import (
    cases_of,
    median_row,
    prism_claim,
    serve,
    shape_entry,
    workload_entry,
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
from moe_edge.studies.prism.table2 import INTERVAL_S, TABLE_2

WHY = (
    "The figure has no numbers in its text. First placed for general text (c4), as the "
    "paper's was for other data; the paper's rule of migration: every 5 minutes, all "
    "statistics kept, no hysteresis. Uniform and Redundance never migrate (IV-B)."
)


def over_time(results: Sequence[ClusterResult]) -> list[float]:
    """Median over seeds of the local ratio in each window in which all have one."""
    windows = min(len(result.ratio_W) for result in results)
    table = np.stack([result.ratio_W[:windows] for result in results])
    full = windows - int(np.isnan(table).any(axis=0)[::-1].argmin())
    table = table[:, :full]
    return [
        float(np.median(column[~np.isnan(column)])) if (column == column).any() else 0.0
        for column in table.T
    ]


def share_between(result: ClusterResult, start_s: float, end_s: float) -> float:
    """Mean of the windows that lie between two times."""
    first, last = (int(round(t / result.window_s)) for t in (start_s, end_s))
    return float(np.nanmean(result.ratio_W[first:last]))


def run(settings: PrismSettings) -> tuple[dict, PrismFindings]:
    """Local ratio over time for every method, placed for other data at first."""
    rows, panels, curves, after, shapes, first = [], [], {}, {}, {}, None
    for workload, model in TABLE_2:
        label = f"{workload}, {model}"
        interval_s = INTERVAL_S[workload]
        cases = cases_of(
            settings,
            workload=workload,
            model=model,
            interval_s=interval_s,
            placed_for="c4",
        )
        first = first or cases[0][1]
        shapes[model] = cases[0][1].shape
        end_s = 0.9 * interval_s * settings.requests_per_server
        if end_s < 4 * settings.window_s:
            raise ConfigError(
                f"{settings.requests_per_server} requests a server last {end_s:g} s, "
                f"expected 4 windows of {settings.window_s:g} s; ask for more requests"
            )
        changed_s = min(2 * settings.period_s, end_s / 2)
        curves[label], after[label] = {}, {}
        for method in settings.methods:
            found = [
                serve(case, method, seed, settings.window_s, **settings.moving)
                for seed, case in cases
            ]
            curves[label][method] = over_time(found)
            for part, span in (
                ("before the first migration", (0.0, settings.period_s)),
                (f"from {changed_s:.0f} s on", (changed_s, end_s)),
            ):
                shares = [share_between(result, *span) for result in found]
                rows.append(
                    median_row(method, f"local ratio, {label}, {part}", shares, "1")
                )
            after[label][method] = round(float(np.median(shares)), 4)
            if "migrated" in found[0].facts:
                moved = [float(result.facts["migrated"]) for result in found]
                rows.append(median_row(method, f"migrations, {label}", moved, "1"))
        print(f"figure 6: {label}: {after[label]}", flush=True)
        panels.append(ratio_panel(label, curves[label], settings.window_s))
    entry = fig6_entry(settings, rows, after, first)
    text = json.dumps({"window_s": settings.window_s, "local_ratio": curves}, indent=1)
    return shape_entry(*shapes.values()), PrismFindings(
        entry=entry,
        plot=lambda path: line_panels(
            path, panels, title="Local compute ratio over time (simulated)"
        ),
        summary={"local_ratio_after": after},
        files={"curves.json": text + "\n"},
    )


def ratio_panel(
    title: str, curves: Mapping[str, Sequence[float]], window_s: float
) -> Panel:
    """Lines of local ratios over minutes."""
    count = max(len(curve) for curve in curves.values())
    return Panel(
        title,
        "computed locally",
        [round(window_s * (n + 0.5) / 60, 2) for n in range(count)],
        {
            method: [*curve, *[np.nan] * (count - len(curve))]
            for method, curve in curves.items()
        },
        x_label="minutes",
    )


def fig6_entry(settings, rows, after: Mapping[str, Mapping[str, float]], case) -> dict:
    """The entry's arguments, from local ratios after the first migrations."""
    shown = [m for m in (EPLB, PRISM, OPTIMUM, OURS) if m in settings.methods]
    sentences = [
        f"{label}: " + ", ".join(f"{m} {100 * by[m]:.1f} %" for m in shown)
        for label, by in after.items()
    ]
    below = [
        f"{label} ({by[PRISM]:.3f}, {max(by, key=by.get)} {max(by.values()):.3f})"
        for label, by in after.items()
        if PRISM in by and by[PRISM] < max(by.values())
    ]
    above = all(
        by[PRISM] >= max(v for m, v in by.items() if m not in (PRISM, OPTIMUM, OURS))
        for by in after.values()
        if PRISM in by and len(by) > 3
    )
    return {
        "question": "Who computes most at home, over time (Prism, figure 6)?",
        "answer": "Computed locally after the first migrations: "
        + "; ".join(sentences)
        + ". Prism's own placement is not the highest in: "
        + (", ".join(below) or "none")
        + ".",
        "workload": workload_entry(
            settings,
            case,
            placed_for="c4",
            window_s=settings.window_s,
            intervals_s=INTERVAL_S,
            **settings.moving,
        ),
        "metrics": rows,
        "baselines": [m for m in settings.methods if m not in (OPTIMUM, OURS, PRISM)],
        "checks": {"Prism is above the paper's baselines, after migrations": above},
        "limits": [
            *LIMITS,
            "Curves are medians over seeds, window by window; seeds do not all migrate "
            "at the same times.",
        ],
        "paper_claim": prism_claim(
            "Prism, figure 6: highest local ratio after migrations at 5 minutes "
            "(BigBench) and 10 minutes (MultiData)",
            {"trend": "Prism highest in all four panels"},
            {"local ratio after the first migrations": after},
            WHY,
        ),
    }
