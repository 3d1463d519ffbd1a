"""The rows of figures 7 and 12, from what all rounds gave."""

import collections
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_edge.metrics.frames import Estimate, Rows, median
from moe_edge.papers.moe_prism.studies.serving_studies import (
    AT_ONCE_LABEL,
    COMPUTED,
    MEASURED,
    PARTS,
    SAME,
    ServingStudySettings,
)

AT_ONCE = math.inf  # the load at which all requests come at the start
FIGURES = {  # name: (measure, keys of `summarise`)
    "throughput": ("throughput", ("throughput_req_s",)),
    "TTFT": ("ttft_ms", ("ttft_ms", "mean")),
    "TTFT, p95": ("ttft_p95_ms", ("ttft_ms", "p95")),
    "TPOT": ("tpot_ms", ("tpot_ms", "mean")),
    "end to end": ("e2e_ms", ("e2e_ms", "mean")),
    "in time": ("in_time", ("slo_attainment",)),
    "mean K": ("mean_k", ("mean_k",)),
}
TIMES = ("TTFT", "TPOT", "end to end")
TOLERANCES = {  # figure: (largest difference of computed to measured, up to which load)
    "throughput": (0.05, AT_ONCE),
    "TPOT": (0.15, 0.7),
    "end to end": (0.20, 0.7),
}


def label_of(load: float) -> str:
    """A load in words."""
    return AT_ONCE_LABEL if load == AT_ONCE else f"load {load:g}"


class Runs:
    """Figures of every kind, system and load, one a round."""

    def __init__(self):
        self._of = collections.defaultdict(list)

    def add(self, kind: str, system: str, load: float, found: Mapping) -> None:
        """A round's figures, as `summarise` gives them."""
        for name, (_, keys) in FIGURES.items():
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

    def gain(
        self, kind: str, system: str, base: str, load: float, name: str
    ) -> Estimate:
        """The system's figure over the base's, less 1: the rounds' median and range."""
        mine, its = (self(kind, who, load, name) for who in (system, base))
        return median(np.divide(mine, its) - 1)

    def to_json(self) -> str:
        """All of them."""
        rows = [
            {"kind": kind, "system": system, "load": load, "figure": name, "rounds": of}
            for (kind, system, load, name), of in self._of.items()
        ]
        return json.dumps(rows, indent=1) + "\n"


def tell_runs(
    rows: Rows, settings: ServingStudySettings, runs: Runs, rate: float
) -> None:
    """Adds every figure, what each system and part brings, and how far computed ones
    are from those measured."""
    base, loads = settings.systems[0], (*settings.loads, AT_ONCE)
    rows("sustained", base, rate=rate)
    for kind in (MEASURED, COMPUTED):
        for system in settings.systems:
            for load in loads:
                found = {
                    measure: median(runs(kind, system, load, name))
                    for name, (measure, _) in FIGURES.items()
                }
                rows("figures", kind, label_of(load), system, **found)

    def add(kind: str, system: str, over: str, load: float, name: str) -> None:
        gain = runs.gain(kind, system, over, load, name)
        rows("gains", name, kind, label_of(load), system, over, gain=gain)

    top = max(settings.loads)
    for system in settings.systems[1:]:
        for kind in (MEASURED, COMPUTED):
            add(kind, system, base, AT_ONCE, "throughput")
        for name in TIMES:
            add(MEASURED, system, base, top, name)
    for _, system, without in PARTS:
        if {system, without} <= set(settings.systems) and without != base:
            add(MEASURED, system, without, AT_ONCE, "throughput")
            add(MEASURED, system, without, top, "TPOT")
    tell_differences(rows, settings, runs)


def tell_differences(rows: Rows, settings: ServingStudySettings, runs: Runs) -> None:
    """Adds where a computed figure is furthest from the one measured."""
    for name, (allowed, most_load) in TOLERANCES.items():
        errors = [
            (abs(computed / measured - 1), system, label_of(load))
            for system in settings.systems
            for load in (*settings.loads, AT_ONCE)
            if load <= most_load
            for computed, measured in [
                [runs.median(kind, system, load, name) for kind in (SAME, MEASURED)]
            ]
        ]
        if errors:
            error, system, load = max(errors)
            rows("differences", name, system, load, error=error, allowed=allowed)


def below_floor(settings: ServingStudySettings, runs: Runs) -> int:
    """Tokens computed with fewer sub-experts than their request's floor."""
    return sum(
        sum(runs(kind, system, load, "below the floor"))
        for kind in (MEASURED, COMPUTED)
        for system in settings.systems
        for load in (*settings.loads, AT_ONCE)
    )
