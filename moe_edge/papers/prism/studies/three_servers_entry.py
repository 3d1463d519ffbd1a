"""The entry of `prism_three_servers`: measured and simulated side by side."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.study import Findings
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.prism.studies.live_entry import live_findings, same_tokens
from moe_edge.papers.prism.studies.live_shares import PARTS
from moe_edge.papers.prism.studies.served import (
    EPLB,
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    MethodRuns,
    median_row,
    percent,
    stored,
)
from moe_edge.papers.prism.studies.three_servers import (
    ERROR_PCT,
    Runs,
    ThreeServers,
    run_all,
)

MORE_LOCAL = 0.08  # of all pairs, than heterogeneous EPLB
WORST_PCT = 20.0  # error of the simulator
KEYS = (LOCAL, MEAN, "remote_calls")
LINKS = (
    "One start at one rate of links. The order of placements depends on the rate: in a "
    "trial at 100 Mbit/s (two seeds) `optimal` was slower than heterogeneous EPLB, "
    "0.344 and 0.315 s against 0.277 and 0.279 s, `latency` faster, 0.234 and 0.261 s; "
    "in another start at 500 Mbit/s `optimal` was 5 % slower than it."
)


def measure(settings: ThreeServers) -> Findings:
    """Runs it all; the answer."""
    with settings.folder() as folder:
        return findings(settings, run_all(settings, folder))


def findings(settings: ThreeServers, runs: Runs) -> Findings:
    """The entry of some runs."""
    real, methods = runs.measured, settings.methods
    best = min(methods, key=real.median)
    change = f"{real.change(best, EPLB)} to {EPLB}, " if EPLB in methods else ""
    return live_findings(
        settings,
        runs.facts,
        answer=f"{best} has the lowest mean latency, {real.median(best):.2f} s "
        f"({change}{100 * real.median(best, LOCAL):.0f} % of pairs at home); the "
        f"simulator is at most {runs.worst_pct:.0f} % off.",
        details=details(runs),
        metrics=metrics(runs),
        limits=[
            LINKS,
            "Few requests; spreads are over seeds of requests, arrivals and random "
            "placements.",
            "The simulator takes each method's own costs of parts (by how many servers "
            "were busy), requests, routing and tables: its error is its timing's, not "
            "a forecast's.",
        ],
        plot=functools.partial(plot, runs=runs),
        baselines=[m for m in methods if m not in (OPTIMUM, OURS)],
        checks=checks(runs),
        ours=ours(runs),
        files=stored(
            {
                "measured": real.only(*real.rows[methods[0]][0]),
                "simulated": runs.simulated.only(*KEYS, "error_pct"),
                "shares": MethodRuns(runs.shares),
            }
        ),
        summary={"error_pct": {m: float(np.median(runs.errors(m))) for m in methods}},
    )


def details(runs: Runs) -> list[str]:
    """A line a method: measured, simulated, where its time goes."""
    lines = []
    for method in runs.measured.rows:
        real, computed = (
            f"{served.median(method):.3f} s, {100 * served.median(method, LOCAL):.1f} "
            f"% local, {served.median(method, 'remote_calls'):.0f} remote calls"
            for served in (runs.measured, runs.simulated)
        )
        error_pct = float(np.median(runs.errors(method)))
        spent = ", ".join(
            f"{part} {100 * runs.share(method, part):.0f} %" for part in PARTS
        )
        lines.append(
            f"{method}: measured {real}; simulated {computed} ({error_pct:+.1f} %). "
            f"Of a request's time: {spent}."
        )
    return lines


def metrics(runs: Runs) -> list[dict]:
    """Rows of the entry."""
    found = []
    for method in runs.measured.rows:
        for label, served in (
            ("measured", runs.measured),
            ("simulated", runs.simulated),
        ):
            for key, unit in zip(KEYS, ("1", "s", "1"), strict=True):
                name = f"{key.removesuffix('_s').replace('_', ' ')}, {label}"
                found.append(median_row(method, name, served.values(method, key), unit))
        error = median_row(method, "simulator's error", runs.errors(method), "%")
        found.append(error)
        for part in PARTS:
            shares = [share[part] for share in runs.shares[method]]
            found.append(median_row(method, f"share of time: {part}", shares, "1"))
    late = sum(facts["compiled_after_warmup"] for facts in runs.facts)
    return [*found, metric("all", "programs compiled after warm-up", late, "1")]


def checks(runs: Runs) -> dict[str, bool]:
    """What the project set out to reach, and what must hold of any run."""
    real = runs.measured
    found = same_tokens(runs.facts) | {
        f"simulated within {ERROR_PCT:.0f} % of measured": runs.worst_pct <= ERROR_PCT,
        f"simulated within {WORST_PCT:.0f} % of measured": runs.worst_pct <= WORST_PCT,
        f"the simulator's order where methods differ by more than {ERROR_PCT:.0f} %": (
            runs.same_order()
        ),
    }
    for method in (OPTIMUM, OURS):
        if {method, EPLB} <= set(real.rows):
            more = real.values(method, LOCAL) - real.values(EPLB, LOCAL)
            name = f"target: {method} keeps {MORE_LOCAL} more pairs local than {EPLB}"
            found[name] = bool((more >= MORE_LOCAL).all())
            name = f"target: {method} is faster than {EPLB} in every seed"
            found[name] = bool((real.ratio(method, EPLB) < 1).all())
    return found


def ours(runs: Runs) -> dict[str, Any]:
    """Our numbers beside the paper's."""
    real = runs.measured
    found: dict[str, Any] = {"seconds, server by server and mean": real.cells()}
    found["local ratio"] = {m: round(real.median(m, LOCAL), 4) for m in real.rows}
    if EPLB in real.rows:
        others = [m for m in real.rows if m != EPLB]
        found["latency, change to EPLB"] = {m: real.change(m, EPLB) for m in others}
        found["remote pairs, change to EPLB"] = {
            m: percent((1 - real.values(m, LOCAL)) / (1 - real.values(EPLB, LOCAL)))
            for m in others
        }
    return found


def plot(path: Path, runs: Runs) -> None:
    """Latency and local ratio, measured and simulated; where time goes."""
    methods = list(runs.measured.rows)
    short = [method.split("_")[0] for method in methods]
    both = {"measured": runs.measured, "simulated": runs.simulated}
    panels = [
        Panel(
            title,
            y_label,
            short,
            {k: [v.median(m, key) for m in methods] for k, v in both.items()},
            {
                k: [float(np.ptp(v.values(m, key))) / 2 for m in methods]
                for k, v in both.items()
            },
        )
        for title, y_label, key in (
            ("Mean latency", "s", MEAN),
            ("Pairs computed at home", "share", LOCAL),
        )
    ]
    shares = {part: [runs.share(method, part) for method in methods] for part in PARTS}
    panels.append(Panel("Where a request's time goes", "share", short, shares))
    draw_panels(path, panels, title="Prism's methods on three live servers")
