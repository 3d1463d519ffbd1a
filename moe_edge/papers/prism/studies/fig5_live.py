"""Prism, figure 5, live: a decoded token's time a layer over its share of remote pairs.

Every decoded token is one observation: live placements leave each of its layers another
share of its (token, block) pairs at home. Tokens of a request belong together, so the
intervals resample requests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import check_known
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.prism.studies import live_seeds
from moe_edge.papers.prism.studies.live_entry import (
    NOT_COMPARABLE,
    live_findings,
    same_tokens,
)
from moe_edge.papers.prism.studies.live_seeds import LiveMethods, each_seed
from moe_edge.papers.prism.studies.live_tokens import Tokens, read_tokens
from moe_edge.papers.prism.studies.served import OPTIMUM
from moe_edge.place.placer import PLACERS

MS = 1e3
FEWEST = 20  # tokens of a bin that is shown
RESAMPLES = 500
INTERVAL = "half of the 95 % interval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure5Live(LiveMethods):
    """`LiveMethods` names the rest.

    Attributes:
      methods: placers that leave different shares to others.
      bins: of the share of remote pairs, of equal width.
    """

    rules = LiveMethods.rules | {
        "methods": lambda name, value: check_known("method", value, PLACERS)
    }
    methods: Sequence[str] = (OPTIMUM, "uniform")
    requests_per_server: int = 8
    interval_s: float = 3.0
    bins: int = 10


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def row(self, name: str, unit: str, count: int, policy: str = "all") -> dict:
        """As a metric, of so many observations."""
        spread = (INTERVAL, (self.high - self.low) / 2)
        return metric(policy, name, self.value, unit, count, spread)


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
      bins: number of the bin -> median, and how many tokens it has.
      slope, home: of a line: ms from no pair remote to all, and ms with none.
      ratio: all remote over none, by that line.
      within: the slope within requests.
    """

    bins: Mapping[int, tuple[Estimate, int]]
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
            number: (_estimate(medians[:, number]), int(counts[number]))
            for number in np.flatnonzero(counts >= FEWEST).tolist()
        },
        *(_estimate(values) for values in (slope, home, 1 + slope / home, within)),
    )


def _estimate(values: np.ndarray) -> Estimate:
    """The first value, with an interval by the others."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def measure(settings: Figure5Live) -> Findings:
    """Runs every seed; the answer."""
    runs: dict[str, list[Tokens]] = {method: [] for method in settings.methods}
    facts = []
    with settings.folder() as folder:
        for run in each_seed(settings, folder):
            facts.append(run.facts)
            for method in settings.methods:
                runs[method].append(read_tokens(run.folder, method))
    return findings(settings, runs, facts)


def findings(
    settings: Figure5Live,
    runs: Mapping[str, Sequence[Tokens]],
    facts: Sequence[Mapping],
) -> Findings:
    """The entry of some runs."""
    num_layers, bins = facts[0]["num_layers"], settings.bins
    everything = [tokens for by_seed in runs.values() for tokens in by_seed]
    parts = {"all": everything} | (dict(runs) if len(runs) > 1 else {})
    found = {
        name: trend(layers_of(tokens, num_layers), bins, settings.seed)
        for name, tokens in parts.items()
    }
    whole = found["all"]
    rows = []
    for name, one in found.items():
        count = sum(len(tokens.request_T) for tokens in parts[name])
        rows.append(one.slope.row("slope from none to all remote", "ms", count, name))
        rows.append(one.within.row("slope within requests", "ms", count, name))
        rows.append(one.ratio.row("all remote over none", "1", count, name))
        for number, (median, tokens) in one.bins.items():
            label = f"time of a layer, {_span(number, bins)} % of pairs remote"
            rows.append(median.row(label, "ms", tokens, name))
    medians = {n: round(m.value, 3) for n, (m, _) in whole.bins.items()}
    first, last = min(medians), max(medians)
    times = medians[last] / medians[first]
    return live_findings(
        settings,
        facts,
        answer=f"A decoded token's layer takes {medians[first]:.2f} ms with "
        f"{_span(first, bins)} % of its pairs remote and {medians[last]:.2f} ms with "
        f"{_span(last, bins)} % ({times:.1f} times as long).",
        details=[
            f"A line through all tokens rises from {whole.home.value:.2f} ms with no "
            f"pair remote by {whole.slope.value:.2f} ms to all remote (95 % interval "
            f"{whole.slope.low:.2f} to {whole.slope.high:.2f}): "
            f"{whole.ratio.value:.1f} times as long. Within requests, where other load "
            f"cancels out, it rises by {whole.within.value:.2f} ms "
            f"({whole.within.low:.2f} to {whole.within.high:.2f}).",
        ],
        metrics=rows,
        limits=[
            "A token's time is what the scheduler saw between two tokens, over the "
            "layers: head, sampling and messages of control are in it.",
            "Shares differ between servers, as slots do: little is remote at the "
            "largest server, much at the others. Methods are shown apart, too.",
        ],
        checks=same_tokens(facts)
        | {
            "target: a layer takes longer the more pairs are remote": (
                whole.slope.low > 0 and whole.within.low > 0
            )
        },
        ours={
            "trend": f"{times:.1f} times as long from {_span(first, bins)} to "
            f"{_span(last, bins)} % remote",
            "ms by % remote": {_span(n, bins): ms for n, ms in medians.items()},
            "slope, ms": round(whole.slope.value, 3),
            "slope within requests, ms": round(whole.within.value, 3),
        },
        plot=lambda path: plot(path, found, bins),
        summary={
            "slope_ms": whole.slope.value,
            "interval_ms": [whole.slope.low, whole.slope.high],
        },
    )


def _span(number: int, bins: int) -> str:
    """Percents of a bin, such as `10-20`."""
    return f"{100 * number / bins:.0f}-{100 * (number + 1) / bins:.0f}"


def plot(path, found: Mapping[str, Trend], bins: int) -> None:
    """Medians over the share of remote pairs."""
    series, spreads = {}, {}
    for name, one in found.items():
        table = np.full((3, bins), np.nan)
        for number, (median, _) in one.bins.items():
            table[:, number] = median
        value, low, high = table
        series[name] = value.tolist()
        spreads[name] = np.maximum([value - low, high - value], 0)
    panel = Panel(
        "decoded tokens, median and 95 % interval",
        "time of a layer (ms)",
        [100 * (number + 0.5) / bins for number in range(bins)],
        series,
        spreads,
        x_label="pairs computed remotely (%)",
    )
    draw_panels(path, [panel], title="Time of a layer over remote pairs")


STUDY = Study(
    name="prism_fig5_live",
    question="What do remote experts cost a layer on three live servers (Prism, figure "
    "5)?",
    settings=Figure5Live,
    measure=measure,
    check=live_seeds.check,
    claim=Claim(
        source="Prism, figure 5: time of a layer over the share of remote experts",
        paper={"trend": "rises sharply"},
        why="The figure has no numbers in its text. The paper's remote expert is "
        "loaded into GPU memory on arrival; here it is resident there. All of a "
        "layer's pairs for one server share a message, so the first one costs most; "
        "and a layer with no remote pair still runs the router and reads its choice.",
        not_comparable=NOT_COMPARABLE,
    ),
)
