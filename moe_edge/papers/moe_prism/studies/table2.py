"""MoE-Prism, table 2 and figure 9: perplexity over the number of sub-experts."""

from collections.abc import Mapping
from typing import NamedTuple

from moe_edge.bench.study import Findings
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import interval_metric, metric
from moe_edge.papers.moe_prism.studies import making, models, quality
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Point, k_panel, log_interpolate
from moe_edge.papers.moe_prism.studies.studies import Table2Settings

SHOWN = (12, 16, 20, 24)  # K of the paper's table
EXACT = 1e-4  # relative: LG at U k' against the parent, over summation order
WORSE = 5e-4  # relative: below, the third digit does not change

Points = Mapping[tuple[str, int], Point]  # by model and K, the original first


def run(settings: Table2Settings) -> Findings:
    """Measures every model at every K."""
    settings = making.make_models(settings)
    compared = quality.Compared.load(settings.checkpoints())
    texts, sources = quality.read_tokens(settings, compared.parent.tokenizer)
    short = [ids[: settings.curve_tokens] for ids in texts]
    table, curve = (
        {key: quality.measure(e, ids) for key, e in compared.at(k_values).items()}
        for k_values, ids in (
            (settings.k_values, texts),
            (settings.curve_k_values, short),
        )
    )
    workload = {"texts": sources, "sub_experts": compared.sub_experts}
    return findings(settings, table, curve, compared.model, workload)


class Ratio(NamedTuple):
    """Perplexity over the original's.

    Attributes:
      at_k: at the same K; interval: of it, 95 % (paired bootstrap over the tokens).
      level: at as many neurons; None where the original has no neighbours to
        interpolate between.
    """

    at_k: float
    interval: tuple[float, float]
    level: float | None

    @property
    def is_worse(self) -> bool:
        """Whether it is at as many neurons, beyond the interval's width."""
        value = self.at_k if self.level is None else self.level
        low, high = self.interval
        return value > 1 + max(WORSE, (high - low) / 2)


def ratios(points: Points) -> dict[str, dict[int, Ratio]]:
    """Model -> K -> how it compares with the original."""
    original = {k: point for (name, k), point in points.items() if name == ORIGINAL}
    known = {point.neurons: point.perplexity for point in original.values()}
    found: dict[str, dict[int, Ratio]] = {}
    for (name, k), point in points.items():
        if name != ORIGINAL and k in original:
            level = log_interpolate(point.neurons, known)
            at_k = point.perplexity / original[k].perplexity
            same = None if level is None else point.perplexity / level
            interval = point.interval(original[k])
            found.setdefault(name, {})[k] = Ratio(at_k, interval, same)
    return found


def rows_of(points: Points, what: str = "") -> list[dict]:
    """Perplexity, neurons and ratios of every model and K; `what` begins the names."""
    rows = []
    for (name, k), point in points.items():
        value, n = point.perplexity, point.tokens
        rows.append(metric(name, f"{what}perplexity, K={k}", value, "1", n))
        rows.append(metric(name, f"{what}active neurons, K={k}", point.neurons, "1"))
    for name, by_k in ratios(points).items():
        for k, one in by_k.items():
            n, at = points[name, k].tokens, f"K={k}"
            told = f"{what}ratio to the original, {at}"
            rows.append(interval_metric(name, told, one.at_k, one.interval, n))
            if one.level is not None:
                told = f"{what}ratio at as many active neurons, {at}"
                rows.append(metric(name, told, one.level, "1", n))
    return rows


def in_words(ratio: Ratio) -> str:
    """A model's ratio, and neuron for neuron with what its gate computes."""
    level = ratio.level
    told = "" if level is None else f" ({level:.3f} neuron for neuron)"
    return f"{ratio.at_k:.3f}{told}"


def in_short(ratio: Ratio) -> str:
    """The same for an answer."""
    level = "-" if ratio.level is None else f"{ratio.level:.3f}"
    return f"{ratio.at_k:.3f}/{level}"


def worse_points(found: Mapping[str, Mapping[int, Ratio]]) -> list[str]:
    """Models and K that lose to the original at as many active neurons."""
    return [
        f"{name} K={k} ({one.at_k if one.level is None else one.level:.3f})"
        for name, by_k in found.items()
        for k, one in by_k.items()
        if one.is_worse
    ]


def findings(
    settings: Table2Settings, table: Points, curve: Points, model, workload
) -> Findings:
    """The entry from what was measured: the paper's K, and every K for the picture."""
    found, of_curve = ratios(table), ratios(curve)
    ks = found[min(found)]
    first = next(k for k in (*SHOWN, *sorted(ks)) if k in ks)
    last = max(k for name, k in table if name == ORIGINAL)
    whole = table[ORIGINAL, last].perplexity
    worse = worse_points(found)
    exact = [
        abs(ratio.at_k - 1) < EXACT
        for one in (found, of_curve)
        for ratio in one.get(LG, {}).values()
    ]
    law = {"LG equals the original at every K that U divides": all(exact)}
    ours = {
        name: {k: round(one.at_k, 4) for k, one in by_k.items()}
        for name, by_k in found.items()
    }
    perplexity: dict[str, dict[int, float]] = {}
    for (name, k), point in table.items():
        perplexity.setdefault(name, {})[k] = round(point.perplexity, 4)
    details = [
        f"{name}: "
        + ", ".join(f"K={k} {in_words(by_k[k])}" for k in SHOWN if k in by_k)
        + "."
        for name, by_k in found.items()
    ]
    points = sum(r.level is not None for ks in found.values() for r in ks.values())
    details.append(
        f"Worse than the original at as many active neurons in {len(worse)} of "
        f"{points} points: "
        f"{', '.join(worse) or 'none'}; on the curve's shorter text: "
        f"{', '.join(worse_points(of_curve)) or 'none'}."
    )
    return models.findings(
        settings,
        answer=f"Perplexity over the original's, K = {first} / equal neurons: "
        + "".join(f"{name} {in_short(ks[first])}; " for name, ks in found.items())
        + f"original at K = {last} {whole / table[ORIGINAL, first].perplexity:.3f}.",
        details=details,
        model=model,
        workload=workload,
        metrics=[*rows_of(table), *rows_of(curve, "curve: ")],
        checks=law if exact else {},
        ours=ours,
        plot=lambda path: plot(path, found, curve),
        summary={"ratio": ours, "perplexity": perplexity},
    )


def plot(path, found: Mapping[str, Mapping[int, Ratio]], curve: Points) -> None:
    """Perplexity at every K, and the ratio at the K of the table."""
    perplexity = {key: point.perplexity for key, point in curve.items()}
    relative = {(ORIGINAL, k): 1.0 for by_k in found.values() for k in by_k}
    relative |= {
        (name, k): one.at_k for name, ks in found.items() for k, one in ks.items()
    }
    panels = [
        k_panel("all K", "perplexity", perplexity),
        k_panel("against the original", "perplexity ratio at equal K", relative),
    ]
    draw_panels(path, panels, title="Perplexity over the number of sub-experts")
