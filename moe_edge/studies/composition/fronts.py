"""Pareto fronts of time a token over perplexity ratio, and what they say."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, interval_metric, metric
from moe_edge.studies.composition.methods import COMPOSED, Method
from moe_edge.studies.composition.settings import ComposeSettings

MOST_RATIO = 1.01  # of the perplexity
MARGIN, FEWER = 0.05, 0.5  # the bars: a single method's lead, and bytes
MIDDLE = 0.25  # the budget of the second
LIMITS = (
    "Times are computed, by replay from measured steps and misses over an emulated "
    "link; rows named emulated, if there are some, ran in real time.",
    "One tiny model that tolerates nearly anything: 64 experts of 74 kB a layer. What "
    "wins here need not win at 30 B parameters.",
    "Caches begin empty and pass from row to row; nothing but an oracle prefetches, "
    "which bounds every predictor from below. The shadow never errs, either.",
    "Prism places experts on other servers and CoServe whole models: neither has a "
    "place under one device's budget. CPU assist is left out: host and device are one.",
    "A few strengths of each route were tried, and the best within the bound is taken "
    "on the same text: of those alone and of those together alike.",
    "Pruning was calibrated on the same kind of text, where it lowers perplexity; that "
    "is spent on a stronger route. Exact match of tasks stands beside it.",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """A method at a budget.

    Attributes:
      slots: of each layer; moved, moved_bytes: blocks and bytes a token.
      ratio, interval: of the perplexity; agreement: of the likeliest tokens.
      tpot_s: by link.
    """

    method: Method
    share: float
    slots: int
    ratio: float
    interval: Sequence[float]
    agreement: float
    tokens: int
    moved: float
    moved_bytes: float
    tpot_s: Mapping[str, float]

    def line(self) -> str:
        """What there is to see while the study runs."""
        times = ", ".join(f"{1e3 * s:.2f}" for s in self.tpot_s.values())
        return (
            f"{self.share:.0%} {self.method.name}: x{self.ratio:.4f}, "
            f"{self.moved:.2f} moved, {times} ms"
        )

    @property
    def is_good(self) -> bool:
        return self.ratio <= MOST_RATIO

    def rows(self) -> list[dict[str, Any]]:
        """Of the entry."""
        at, name = f"{self.share:.0%}", self.method.name
        found = [
            metric(name, f"time a token, {at}, link {factor}, computed", 1e3 * s, "ms")
            for factor, s in self.tpot_s.items()
        ]
        given = self.ratio, self.interval, self.tokens
        found.append(interval_metric(name, f"perplexity ratio, {at}", *given))
        moved = f"moved a token, {at}"
        return [*found, metric(name, moved, 1e-3 * self.moved_bytes, "kB")]


def best(points: Iterable[Point], factor: str) -> Point | None:
    """The fastest whose perplexity ratio is within the bound."""
    good = [point for point in points if point.is_good]
    return min(good, key=lambda point: point.tpot_s[factor], default=None)


def front(points: Iterable[Point], factor: str) -> list[Point]:
    """Those that no other one beats in both, by ratio."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.ratio, p.tpot_s[factor])):
        if not found or point.tpot_s[factor] < found[-1].tpot_s[factor]:
            found.append(point)
    return found


def singles(points: Iterable[Point], is_bfloat16: bool) -> list[Point]:
    """Each method alone."""
    chosen = (p for p in points if p.method.family != COMPOSED)
    return [p for p in chosen if p.method.is_bfloat16 or not is_bfloat16]


def composed(points: Iterable[Point], is_bfloat16: bool) -> list[Point]:
    """Several together."""
    chosen = (p for p in points if p.method.family == COMPOSED)
    return [p for p in chosen if p.method.is_bfloat16 or not is_bfloat16]


GROUPS = {
    "alone, bfloat16": lambda points: singles(points, True),
    "composed, bfloat16": lambda points: composed(points, True),
    "alone, any format": lambda points: singles(points, False),
    "composed, any format": lambda points: composed(points, False),
}


def live_points(
    points: Sequence[Point], settings: ComposeSettings
) -> list[tuple[Point, float]]:
    """Cases for real time: the best of each group at the middle budget, by link."""
    shares = sorted(settings.shares, key=lambda share: abs(share - MIDDLE))
    here = [p for p in points if p.share == shares[0] and not p.method.foresight]
    factors = sorted(settings.link_factors, key=lambda factor: abs(factor - 2))
    found: list[tuple[Point, float]] = []
    for factor in factors:
        named = {p.method.name: p for p in here}
        of_groups = (best(of(here), f"{factor:g}") for of in GROUPS.values())
        chosen = [named["lru"], *of_groups]
        pairs = [(point, factor) for point in chosen if point is not None]
        for pair in pairs:
            if pair not in found:
                found.append(pair)
    return found[: settings.live_cases]


def leads(points: Sequence[Point], settings) -> dict[tuple[float, str], float | None]:
    """By budget and link: what the best alone takes over the best composition, less 1.

    Above 0 the composition leads; None: nothing is within the bound on one side.
    """
    found = {}
    for share in settings.shares:
        here = [p for p in points if p.share == share]
        for factor in (f"{f:g}" for f in settings.link_factors):
            alone = best(singles(here, True), factor)
            ours = best(composed(here, True), factor)
            found[share, factor] = (
                None
                if alone is None or ours is None
                else alone.tpot_s[factor] / ours.tpot_s[factor] - 1
            )
    return found


def fewest_bytes(points: Sequence[Point], is_bfloat16: bool) -> Point | None:
    """Of the middle budget, the one that moves least within the bound."""
    near = min({p.share for p in points}, key=lambda share: abs(share - MIDDLE))
    good = [p for p in points if p.share == near and p.is_good]
    good = [p for p in good if p.method.is_bfloat16 == is_bfloat16]
    return min(good, key=lambda p: p.moved_bytes, default=None)


def findings(
    settings: ComposeSettings,
    points: Sequence[Point],
    quality: Mapping[str, Mapping[str, Any]],
    live: Sequence[tuple[Point, float, float, float]],
    entry: Mapping[str, Any],
    steps: Mapping[str, Any],
) -> Findings:
    """The entry."""
    found = leads(points, settings)
    fewest = [fewest_bytes(points, is_bfloat16) for is_bfloat16 in (True, False)]
    known = [lead for lead in found.values() if lead is not None]
    is_unbeaten = bool(known) and min(known) >= -MARGIN
    share = None
    if all(fewest):
        share = fewest[1].moved_bytes / max(fewest[0].moved_bytes, 1e-9)
    error = [tpot_s / p.tpot_s[f"{factor:g}"] - 1 for p, factor, tpot_s, _ in live]
    rows = [row for point in points for row in point.rows()]
    for point, factor, tpot_s, misses in live:
        name = f"{point.share:.0%}, link {factor:g}, emulated"
        who = point.method.name
        rows.append(metric(who, f"time a token, {name}", 1e3 * tpot_s, "ms"))
        rows.append(metric(who, f"misses a token, {name}", misses, "1"))
    for name, one in quality.items():
        given = one["ratio"], one["interval"], one["tokens"]
        rows.append(interval_metric(name, "perplexity ratio, resident", *given))
        count = one["questions"]
        rows.append(metric(name, "exact match", one["exact_match"], "1", count))
    answer = "Nothing composed is within the bound of perplexity."
    if known and share is not None:
        answer = (
            f"In bfloat16 the best alone takes {min(known):+.1%} to {max(known):+.1%} "
            f"more time than the best composition; at {fewest[1].share:.0%} "
            f"{fewest[1].method.name} moves {share:.3f} of the bytes of bfloat16's "
            f"best, at a perplexity ratio of {fewest[1].ratio:.3f}."
        )
    layer_s = next(iter(steps.values())).layer_s
    return Findings(
        answer=answer,
        details=[*_details(points, settings), *_live_details(live, error)],
        kind="simulated",
        model=entry["model"],
        workload=entry["workload"] | {"layer_s": layer_s},
        metrics=rows,
        limits=LIMITS,
        seeds=[settings.seed],
        baselines=["lru", "each method alone"],
        checks={
            "bfloat16: no method alone beats the composition by over 5 %": is_unbeaten,
            "any format: at most half the bytes of bfloat16's best at 25 %": share
            is not None
            and share <= FEWER,
        },
        plot=lambda path: plot(path, points, settings),
        files={"points.json": json.dumps([_json(p) for p in points], indent=1) + "\n"},
        summary={
            "leads": {f"{s:g} {f}": lead for (s, f), lead in found.items()},
            "bytes_share": share,
            "replay_error": error,
        },
    )


def _json(point: Point) -> dict[str, Any]:
    return {**dataclasses.asdict(point), "method": point.method.name}


def _details(points: Sequence[Point], settings: ComposeSettings) -> list[str]:
    """The best of each group, in a sentence for each budget and link."""
    lines = []
    for share in settings.shares:
        here = [p for p in points if p.share == share]
        for factor in (f"{f:g}" for f in settings.link_factors):
            parts = []
            for group, of in GROUPS.items():
                if (one := best(of(here), factor)) is not None:
                    time = f"{1e3 * one.tpot_s[factor]:.2f} ms"
                    parts.append(f"{group} {one.method.name} {time}, x{one.ratio:.3f}")
            lines.append(f"{share:.0%}, link {factor}: {'; '.join(parts)}.")
    return lines


def _live_details(live, error: Sequence[float]) -> list[str]:
    if not error:
        return []
    cases = "; ".join(
        f"{p.method.name}, link {factor:g}: {1e3 * tpot_s:.2f} ms, replay "
        f"{1e3 * p.tpot_s[f'{factor:g}']:.2f}"
        for p, factor, tpot_s, _ in live
    )
    median, worst = np.median(np.abs(error)), np.max(np.abs(error))
    return [f"Emulated: {cases}; replay errs by {median:.0%} (median), {worst:.0%}."]


def plot(path: Path, points: Sequence[Point], settings: ComposeSettings) -> None:
    """A panel for each budget and link: the front of each group."""
    panels = []
    for share in settings.shares:
        here = [p for p in points if p.share == share]
        for factor in (f"{f:g}" for f in settings.link_factors):
            fronts = {name: front(of(here), factor) for name, of in GROUPS.items()}
            x = sorted({p.ratio for each in fronts.values() for p in each})
            series = {}
            for name, each in fronts.items():
                at = {p.ratio: 1e3 * p.tpot_s[factor] for p in each}
                series[name] = [at.get(ratio, np.nan) for ratio in x]
            title = f"{share:.0%} of the bfloat16 bytes, link {factor}"
            label = "perplexity ratio"
            panels.append(Panel(title, "ms a token", x, series, x_label=label))
    title = "Time a token over perplexity (simulated)"
    draw_panels(path, panels, title=title, columns=len(settings.link_factors))
