"""Prism, figure 5, live: a decoded token's time a layer over its share of remote pairs.

Every decoded token is one observation: live placements leave each of its layers another
share of its (token, block) pairs at home. Tokens of a request belong together, so the
intervals resample requests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame, interval
from moe_edge.papers.prism.studies import live_seeds
from moe_edge.papers.prism.studies.live_entry import same_tokens, tell
from moe_edge.papers.prism.studies.live_seeds import LiveMethods, PlacerName, each_seed
from moe_edge.papers.prism.studies.live_tokens import Tokens, read_tokens
from moe_edge.papers.prism.studies.served import OPTIMUM

MS = 1e3
FEWEST = 20  # tokens of a bin that is shown
RESAMPLES = 500
ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure5Live(LiveMethods):
    """`LiveMethods` names the rest.

    Attributes:
      methods: placers that leave different shares to others.
      bins: of the share of remote pairs, of equal width.
    """

    methods: Sequence[PlacerName] = (OPTIMUM, "uniform")
    requests_per_server: int = 8
    interval_s: Positive = 3.0
    bins: int = 10


@dataclasses.dataclass(frozen=True)
class Layers:
    """Time of a layer of every token, and what of it was remote.

    Attributes:
      ms_T: milliseconds.
      remote_T: share of pairs.
      group_T: its request, counted from 0 on.
    """

    ms_T: np.ndarray
    remote_T: np.ndarray
    group_T: np.ndarray

    def bin_T(self, bins: int) -> np.ndarray:
        return np.minimum((self.remote_T * bins).astype(int), bins - 1)

    def line(self, rows: np.ndarray) -> tuple[float, float]:
        """Slope and the value at 0, by least squares over some tokens."""
        slope, home = np.polyfit(self.remote_T[rows], self.ms_T[rows], 1)
        return float(slope), float(home)

    def within(self, rows: np.ndarray) -> float:
        """Slope of differences from the means of each request: what other load and
        other servers add to a whole request cancels out."""
        group_T = self.group_T[rows]
        count_G = np.maximum(np.bincount(group_T), 1)
        x_T, y_T = (
            values_T[rows] - (np.bincount(group_T, values_T[rows]) / count_G)[group_T]
            for values_T in (self.remote_T, self.ms_T)
        )
        return float((x_T * y_T).sum() / (x_T * x_T).sum())

    def medians(self, bins: int, rows: np.ndarray) -> np.ndarray:
        """float64 [bins]: of some tokens; nan where there is none."""
        ms_T, bin_T = self.ms_T[rows], self.bin_T(bins)[rows]
        groups = [ms_T[bin_T == number] for number in range(bins)]
        return np.array([np.median(g) if len(g) else np.nan for g in groups])

    def resampled(self, seed: int) -> list[np.ndarray]:
        """Rows of tokens, whole requests drawn with replacement, RESAMPLES times."""
        rng, count = np.random.default_rng(seed), int(self.group_T.max()) + 1
        rows_of = [np.flatnonzero(self.group_T == group) for group in range(count)]
        drawn = rng.integers(count, size=(RESAMPLES, count))
        return [np.concatenate([rows_of[g] for g in groups]) for groups in drawn]


def layers_of(runs: Sequence[Tokens], num_layers: int) -> Layers:
    """All tokens of several runs of a method or more."""
    groups, first = [], 0
    for tokens in runs:
        _, group_T = np.unique(tokens.request_T, return_inverse=True)
        groups.append(first + group_T)
        first += int(group_T.max()) + 1
    ms_T = np.concatenate([MS * tokens.seconds_T / num_layers for tokens in runs])
    remote_T = np.concatenate([tokens.remote_T for tokens in runs])
    return Layers(ms_T, remote_T, np.concatenate(groups))


class Trend(NamedTuple):
    """What remote pairs cost.

    Attributes:
      bins: number of the bin -> median.
      slope, home: of a line: ms from no pair remote to all, and ms with none.
      ratio: all remote over none, by that line.
      within: the slope within requests.
    """

    bins: Mapping[int, Estimate]
    slope: Estimate
    home: Estimate
    ratio: Estimate
    within: Estimate


def trend(layers: Layers, bins: int, seed: int) -> Trend:
    """Medians of the bins with enough tokens, and a line through all tokens."""
    everything = np.arange(len(layers.ms_T))
    samples = layers.resampled(seed)
    lines = np.array([layers.line(rows) for rows in [everything, *samples]])
    medians = np.array([layers.medians(bins, rows) for rows in [everything, *samples]])
    counts = np.bincount(layers.bin_T(bins), minlength=bins)
    slope, home = lines.T
    within = np.array([layers.within(rows) for rows in [everything, *samples]])
    return Trend(
        {
            number: _estimate(medians[:, number], counts[number])
            for number in np.flatnonzero(counts >= FEWEST).tolist()
        },
        *(
            _estimate(values, len(everything))
            for values in (slope, home, 1 + slope / home, within)
        ),
    )


def _estimate(values: np.ndarray, count: int) -> Estimate:
    """The first value, of so many tokens, with an interval by the others."""
    return interval(values[0], np.nanquantile(values[1:], [0.025, 0.975]), count)


def measure(settings: Figure5Live, rows: Rows) -> None:
    """Runs every seed."""
    runs: dict[str, list[Tokens]] = {method: [] for method in settings.methods}
    facts = []
    with settings.folder() as folder:
        for run in each_seed(settings, folder):
            facts.append(run.facts)
            for method in settings.methods:
                runs[method].append(read_tokens(run.folder, method))
    tell_runs(rows, settings, runs, facts[0]["num_layers"])
    tell(rows, settings, facts)
    rows.checks |= same_tokens(facts)


def tell_runs(
    rows: Rows,
    settings: Figure5Live,
    runs: Mapping[str, Sequence[Tokens]],
    num_layers: int,
) -> None:
    """Adds the trend of all tokens, and of each method where there are several."""
    everything = [tokens for by_seed in runs.values() for tokens in by_seed]
    bins = settings.bins
    for name, tokens in {ALL: everything, **(runs if len(runs) > 1 else {})}.items():
        found = trend(layers_of(tokens, num_layers), bins, settings.seed)
        given = {"ratio": found.ratio, "home_ms": found.home.value}
        slopes = {"slope_ms": found.slope, "within_ms": found.within}
        rows("trends", name, **slopes, **given)
        for number, layer_ms in found.bins.items():
            span, middle = _span(number, bins), 100 * (number + 0.5) / bins
            rows("bins", name, span, middle, layer_ms=layer_ms)


def _span(number: int, bins: int) -> str:
    """Percents of a bin, such as `10-20`."""
    return f"{100 * number / bins:.0f}-{100 * (number + 1) / bins:.0f}"


def derive(tables: Tables) -> dict[str, Any]:
    """The trend of all tokens, and from the first to the last bin."""
    trends, bins = (tables[name] for name in ("trends", "bins"))
    whole = trends[trends.method == ALL].iloc[0]
    ours = bins[bins.method == ALL].sort_values("percent")
    first, last = (ours.iloc[place].to_dict() for place in (0, -1))
    is_longer = whole.slope_ms_low > 0 and whole.within_ms_low > 0
    return {
        "whole": whole.to_dict(),
        "first": first,
        "last": last,
        "times": last["layer_ms"] / first["layer_ms"],
        "checks": {"target: a layer takes longer the more pairs are remote": is_longer},
    }


FRAMES = {
    "trends": frame("method", "slope_ms within_ms ratio home_ms"),
    "bins": frame("method remote percent", "layer_ms"),
}
STUDY = Study(
    "prism_fig5_live",
    Figure5Live,
    measure,
    FRAMES,
    derive,
    check=live_seeds.check,
    start={"seeds": 1},
    partial=("bins",),
)
