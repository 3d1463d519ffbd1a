"""MoE-Prism, table 2 and figure 9: perplexity over the number of sub-experts."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism import models, quality
from moe_edge.studies.moe_prism.models import CG, LG, LG_FT, ORIGINAL
from moe_edge.studies.moe_prism.quality import Point, log_interpolate
from moe_edge.studies.study import Claim, Findings, Study

CLAIM = Claim(
    source="MoE-Prism, table 2, OLMoE: perplexity over the original's by K",
    paper={
        CG: {12: 0.947, 16: 0.987, 20: 1.000, 24: 1.003},
        LG: {12: 0.999, 16: 1.000, 20: 0.999, 24: 1.000},
        LG_FT: {12: 0.934, 16: 0.976, 20: 0.995, 24: 1.004},
    },
    why="The paper's models have 1,024 to 6,144 neurons an expert, of which a token "
    "uses few; the default model has 64, which are much less specialised, and four "
    "gate neurons would be a quarter of a sub-expert: they are counted as active here, "
    "as fractions of the original's neurons. Fine-tuning at the paper's rate hardly "
    "moves the default model's routers, for which whole experts are a local optimum; "
    "thirty times that rate made them worse at every K.",
)
SHOWN = (12, 16, 20, 24)  # K of the paper's table
EXACT = 1e-4  # relative: LG at U k' against the parent, over summation order
WORSE = 5e-4  # relative: below, the third digit does not change

Points = Mapping[tuple[str, int], Point]  # by model and K, the original first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table2Settings(quality.QualitySettings):
    """What is compared, and where; `QualitySettings` names the rest.

    Attributes:
      curve_k_values: K of the picture, on the first `curve_tokens` of every text.
    """

    max_tokens: int = 16_384
    k_values: Sequence[int] = (4, 8, 12, 16, 20, 24, 28, 32)
    curve_k_values: Sequence[int] = quality.EVERY_K
    curve_tokens: int = 4096


def run(settings: Table2Settings) -> Findings:
    """Measures every model at every K."""
    settings = models.make_models(settings)
    compared = quality.Compared.load(settings.checkpoints())
    texts, sources = quality.read_tokens(settings, compared.parent.tokenizer)
    subs = compared.sub_experts
    table, curve = (
        {key: quality.measure(e, ids) for key, e in compared.at(k_values).items()}
        for k_values, ids in (
            (settings.k_values, texts),
            (settings.curve_k_values, [ids[: settings.curve_tokens] for ids in texts]),
        )
    )
    return findings(
        table,
        curve,
        model=compared.model,
        workload=models.workload_of(settings, texts=sources, sub_experts=subs),
        limits=settings.limits(),
    )


Ratio = tuple[float, float | None]


def ratios(points: Points) -> dict[str, dict[int, Ratio]]:
    """Model -> K -> perplexity over the original's at the same K, and at as many
    neurons (None where the original has no neighbours to interpolate between)."""
    original = {k: point for (name, k), point in points.items() if name == ORIGINAL}
    known = {point.neurons: point.perplexity for point in original.values()}
    found: dict[str, dict[int, Ratio]] = {}
    for (name, k), point in points.items():
        if name != ORIGINAL and k in original:
            level = log_interpolate(point.neurons, known)
            at_k = point.perplexity / original[k].perplexity
            same = None if level is None else point.perplexity / level
            found.setdefault(name, {})[k] = at_k, same
    return found


def rows_of(points: Points, what: str = "") -> list[dict]:
    """Perplexity, neurons and ratios of every model and K; `what` begins the names."""
    rows = []
    for (name, k), point in points.items():
        value, n = point.perplexity, point.tokens
        rows.append(metric(name, f"{what}perplexity, K={k}", value, "1", n))
        rows.append(metric(name, f"{what}active neurons, K={k}", point.neurons, "1"))
    for name, by_k in ratios(points).items():
        for k, pair in by_k.items():
            told = ("ratio to the original", "ratio at as many active neurons")
            rows += [
                metric(
                    name, f"{what}{which}, K={k}", value, "1", points[name, k].tokens
                )
                for which, value in zip(told, pair, strict=True)
                if value is not None
            ]
    return rows


def in_words(name: str, ratio: Ratio) -> str:
    """A model's ratio; neuron for neuron too where its gate computes more."""
    at_k, level = ratio
    with_gate = name == CG and level is not None
    return f"{at_k:.3f}" + (f" ({level:.3f} neuron for neuron)" if with_gate else "")


def worse_points(found: Mapping[str, Mapping[int, Ratio]]) -> list[str]:
    """Models and K that lose to the original at as many active neurons."""
    return [
        f"{name} K={k} ({level or at_k:.3f})"
        for name, by_k in found.items()
        for k, (at_k, level) in by_k.items()
        if (level or at_k) > 1 + WORSE
    ]


def findings(table: Points, curve: Points, *, model, workload, limits) -> Findings:
    """The entry from what was measured: the paper's K, and every K for the picture."""
    found, of_curve = ratios(table), ratios(curve)
    first = next(
        k for k in (*SHOWN, *sorted(found[min(found)])) if k in found[min(found)]
    )
    worse = worse_points(found)
    exact = [
        abs(at_k - 1) < EXACT
        for one in (found, of_curve)
        for at_k, _ in one.get(LG, {}).values()
    ]
    law = {"LG equals the original at every K that U divides": all(exact)}
    ours = {
        name: {k: round(at_k, 4) for k, (at_k, _) in by_k.items()}
        for name, by_k in found.items()
    }
    perplexity: dict[str, dict[int, float]] = {}
    for (name, k), point in table.items():
        perplexity.setdefault(name, {})[k] = round(point.perplexity, 4)
    details = [
        f"{name}: "
        + ", ".join(f"K={k} {in_words(name, by_k[k])}" for k in SHOWN if k in by_k)
        + "."
        for name, by_k in found.items()
    ]
    details.append(
        "Worse than the original at as many active neurons: "
        f"{', '.join(worse) or 'none'}; on the curve's shorter text: "
        f"{', '.join(worse_points(of_curve)) or 'none'}."
    )
    return Findings(
        answer=f"Perplexity over the original's at K = {first}: "
        + ", ".join(f"{name} {in_words(name, ks[first])}" for name, ks in found.items())
        + f"; worse than the original at as many active neurons in {len(worse)} of "
        f"{sum(map(len, found.values()))} points.",
        details=details,
        model=model,
        workload=workload,
        metrics=[*rows_of(table), *rows_of(curve, "curve: ")],
        baselines=[ORIGINAL],
        checks=law if exact else {},
        limits=limits,
        ours=ours,
        plot=lambda path: plot(path, found, curve),
        summary={"ratio": ours, "perplexity": perplexity},
    )


def plot(path, found: Mapping[str, Mapping[int, Ratio]], curve: Points) -> None:
    """Perplexity at every K, and the ratio at the K of the table."""

    def panel(title, label, values: Mapping[tuple[str, int], float]) -> Panel:
        ks = sorted({k for _, k in values})
        series = {
            name: [values.get((name, k), np.nan) for k in ks]
            for name in dict.fromkeys(name for name, _ in values)
        }
        x_label = "sub-experts a token K"
        return Panel(title, label, ks, series, x_label=x_label)

    perplexity = {key: point.perplexity for key, point in curve.items()}
    # The original too, so that a colour means one model in both panels.
    relative = {(ORIGINAL, k): 1.0 for by_k in found.values() for k in by_k}
    relative |= {
        (name, k): at_k for name, ks in found.items() for k, (at_k, _) in ks.items()
    }
    panels = [
        panel("all K", "perplexity", perplexity),
        panel("against the original", "perplexity ratio at equal K", relative),
    ]
    line_panels(path, panels, title="Perplexity over the number of sub-experts")


STUDY = Study(
    name="moe_prism_table2",
    question="Do sub-experts lose less perplexity than whole experts at equal compute "
    "(MoE-Prism, table 2 and fig. 9)?",
    settings=Table2Settings,
    measure=run,
    check=models.check_inputs,
    claim=CLAIM,
)
