"""The entries of figures 7 and 12: what runs gave, in words, tables and pictures."""

import collections
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.rounds import ON_TIME
from moe_edge.bench.study import Findings, median_and_spread
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.moe_prism.studies import models
from moe_edge.papers.moe_prism.studies.serving_studies import (
    FIFO,
    OURS,
    PARTS,
    PRISM,
    SAME_REQUESTS,
    ServingStudySettings,
)

AT_ONCE = math.inf  # the load at which all requests come at the start
MEASURED, SAME, COMPUTED = "measured", "same requests, computed", "computed"
FIGURES = {  # name: (keys of `summarise`, unit)
    "throughput": (("throughput_req_s",), "requests/s"),
    "TTFT": (("ttft_ms", "mean"), "ms"),
    "TTFT, p95": (("ttft_ms", "p95"), "ms"),
    "TPOT": (("tpot_ms", "mean"), "ms"),
    "end to end": (("e2e_ms", "mean"), "ms"),
    "in time": (("slo_attainment",), "1"),
    "mean K": (("mean_k",), "1"),
}
SHOWN = ("throughput", "TTFT", "TPOT", "end to end")
TOLERANCES = {  # figure: (largest difference of computed to measured, up to which load)
    "throughput": (0.05, AT_ONCE),
    "TPOT": (0.15, 0.7),
    "end to end": (0.20, 0.7),
}


def label_of(load: float) -> str:
    """A load in words."""
    return "all at once" if load == AT_ONCE else f"load {load:g}"


class Runs:
    """Figures of every kind, system and load, one a round."""

    def __init__(self):
        self._of = collections.defaultdict(list)

    def add(self, kind: str, system: str, load: float, found: Mapping) -> None:
        """A round's figures, as `summarise` gives them."""
        for name, (keys, _) in FIGURES.items():
            value: Any = found
            for key in keys:
                value = value[key]
            self._of[kind, system, load, name].append(
                np.nan if value is None else value
            )
        below = found["floor_violations"]
        self._of[kind, system, load, "below the floor"].append(below)

    def __call__(self, kind: str, system: str, load: float, name: str) -> list[float]:
        return self._of[kind, system, load, name]

    def median(self, kind: str, system: str, load: float, name: str) -> float:
        """Of the rounds."""
        return float(np.median(self(kind, system, load, name)))

    def gain(self, kind: str, system: str, base: str, load: float, name: str) -> str:
        """The system's figure over the base's, less 1: the rounds' median and range."""
        mine, its = (self(kind, who, load, name) for who in (system, base))
        gains = np.divide(mine, its) - 1
        low, high = gains.min(), gains.max()
        return f"{np.median(gains):+.1%} [{low:+.1%}, {high:+.1%}]"

    def to_json(self) -> str:
        """All of them."""
        rows = [
            {"kind": kind, "system": system, "load": load, "figure": name, "rounds": of}
            for (kind, system, load, name), of in self._of.items()
        ]
        return json.dumps(rows, indent=1) + "\n"


def differences(
    runs: Runs, settings: ServingStudySettings
) -> dict[str, tuple[float, str]]:
    """Figure -> (largest difference of computed to measured, where it is)."""
    found = {}
    for name, (_, most_load) in TOLERANCES.items():
        errors = [
            (
                abs(
                    runs.median(SAME, system, load, name)
                    / runs.median(MEASURED, system, load, name)
                    - 1
                ),
                f"{system}, {label_of(load)}",
            )
            for system in settings.systems
            for load in (*settings.loads, AT_ONCE)
            if load <= most_load
        ]
        if errors:
            found[name] = max(errors)
    return found


def parts(settings: ServingStudySettings, runs: Runs, load: float) -> list[str]:
    """What each part brings, where a system with and one without it ran."""
    found = []
    for part, system, without in PARTS:
        if not {system, without} <= set(settings.systems):
            continue
        rate = runs.gain(MEASURED, system, without, AT_ONCE, "throughput")
        tpot = runs.gain(MEASURED, system, without, load, "TPOT")
        found.append(
            f"Brought by {part} ({system} over {without}): throughput with all "
            f"requests at once {rate}, TPOT at {label_of(load)} {tpot}."
        )
    return found


def findings(
    settings: ServingStudySettings,
    runs: Runs,
    rate: float,
    compiled_late: int,
    model: Mapping[str, Any],
) -> Findings:
    """The entry."""
    base, loads = settings.systems[0], (*settings.loads, AT_ONCE)
    top = max(settings.loads)
    n, spread = settings.rounds, "half range of rounds"
    rows = [metric(base, "sustained", rate, "requests/s")]
    for kind in (MEASURED, COMPUTED):
        for system in settings.systems:
            for load in loads:
                for name, (_, unit) in FIGURES.items():
                    values = runs(kind, system, load, name)
                    wide = spread, float(np.ptp(values)) / 2
                    label = f"{name}, {label_of(load)}, {kind}"
                    value = float(np.median(values))
                    rows.append(metric(system, label, value, unit, n, wide))
    ours, details = {}, []
    for system in settings.systems[1:]:
        rates = [
            runs.gain(kind, system, base, AT_ONCE, "throughput")
            for kind in (MEASURED, COMPUTED)
        ]
        ours[f"throughput over {base}, {system}"] = rates[0]
        times = ", ".join(
            f"{name} {runs.gain(MEASURED, system, base, top, name)}"
            for name in SHOWN[1:]
        )
        details.append(
            f"{system} against {base}: throughput with all requests at once "
            f"{rates[0]} (computed {rates[1]}); at {label_of(top)} {times}."
        )
    details += parts(settings, runs, top)
    off = differences(runs, settings)
    details += [
        f"Computed against measured, the same requests: {name} at most {error:.1%} "
        f"apart ({where})."
        for name, (error, where) in off.items()
    ]
    rate_of = {
        s: runs.median(MEASURED, s, AT_ONCE, "throughput") for s in (settings.systems)
    }
    best = max(rate_of, key=rate_of.get)
    gain = runs.gain(MEASURED, best, base, AT_ONCE, "throughput")
    answer = (
        f"{best} serves most, {rate_of[best]:.2f} requests/s with all requests at once "
        f"({gain} to {base})"
    )
    if PRISM in settings.systems and best != PRISM:
        gain = runs.gain(MEASURED, PRISM, base, AT_ONCE, "throughput")
        answer += f"; {PRISM}'s scheduler {gain}"
    below = sum(
        sum(runs(kind, system, load, "below the floor"))
        for kind in (MEASURED, COMPUTED)
        for system in settings.systems
        for load in loads
    )
    checks = {ON_TIME: compiled_late == 0, "no token below its floor": below == 0}
    checks |= {
        f"computed {name} within {TOLERANCES[name][0]:.0%} of measured": error
        <= TOLERANCES[name][0]
        for name, (error, _) in off.items()
    }
    return models.findings(
        settings,
        answer=answer + ".",
        details=details,
        model=model,
        workload={"sustained_req_s": rate},
        metrics=rows,
        limits=[
            "Load generator and engine share one process; a request waits for the end "
            "of a step until it is seen.",
            "Refactored by a linear gate without fine-tuning: floors say what is "
            "computed, not how good it is (moe_prism_table2).",
            SAME_REQUESTS,
        ],
        ours=ours,
        checks=checks,
        baselines=[name for name in settings.systems if name not in (OURS, PRISM)],
        plot=lambda path: plot(path, runs, settings),
        files={"runs.json": runs.to_json()},
        summary={"sustained_req_s": rate, "ours": ours},
    )


def plot(path, runs: Runs, settings: ServingStudySettings) -> None:
    """Four figures over the load; bars where there is one load."""
    panels, loads = [], (*settings.loads, AT_ONCE)
    for name in SHOWN:
        series, spreads = {}, {}
        for system in settings.systems:
            for kind, mark in ((MEASURED, ""), (COMPUTED, ", computed")):
                pairs = [
                    median_and_spread(runs(kind, system, load, name)) for load in loads
                ]
                series[system + mark] = [value for value, _ in pairs]
                spreads[system + mark] = [wide for _, (_, wide) in pairs]
        x: Sequence = [label_of(load) for load in loads]
        panels.append(Panel(name, FIGURES[name][1], x, series, spreads))
    draw_panels(path, panels, title=f"Against {settings.systems[0] or FIFO}")
