"""MoE-Prism, table 2 and figure 9: perplexity over the number of sub-experts."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_edge.core.progress import progress
from moe_edge.metrics.frames import Rows, Tables, counted, interval
from moe_edge.papers.moe_prism.studies import making, models, quality
from moe_edge.papers.moe_prism.studies.kept import Kept
from moe_edge.papers.moe_prism.studies.models import LG, ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Point, log_interpolate
from moe_edge.papers.moe_prism.studies.studies import Table2Settings

SHOWN = (12, 16, 20, 24)  # K of the paper's table
EXACT = 1e-4  # relative: LG at U k' against the parent, over summation order
WORSE = 5e-4  # relative: below, the third digit does not change
LAW = "LG equals the original at every K that U divides"


def measure(settings: Table2Settings, rows: Rows) -> None:
    """Measures every model at every K; a run that was stopped goes on."""
    settings = making.make_models(settings)
    compared = quality.Compared.load(settings.checkpoints())
    kept = Kept.of(settings)
    texts, sources = quality.read_tokens(settings, compared.parent.tokenizer)
    short = [ids[: settings.curve_tokens] for ids in texts]
    for name, k_values, ids in (
        ("points", settings.k_values, texts),
        ("curve", settings.curve_k_values, short),
    ):
        engines = compared.at(k_values).items()
        found = (kept.point(*key, e, ids) for key, e in progress(engines, name))
        tell(rows, name, dict(zip(dict(engines), found, strict=True)))
    workload = {"texts": sources, "sub_experts": compared.sub_experts}
    models.tell(rows, settings, compared.model, workload)


def tell(rows: Rows, name: str, points: Mapping[tuple[str, int], Point]) -> None:
    """Adds points by model and K, with their ratio to the original at the same K and
    its 95 % interval: a paired bootstrap over the tokens."""
    for (model, k), point in points.items():
        more = {"perplexity": counted(point.perplexity, point.tokens)}
        if model != ORIGINAL and (ORIGINAL, k) in points:
            base = points[ORIGINAL, k]
            ratio, bounds = point.perplexity / base.perplexity, point.interval(base)
            more["ratio"] = interval(ratio, bounds, point.tokens)
        rows(name, model, k, neurons=point.neurons, **more)


def ratios(points: pd.DataFrame) -> pd.DataFrame:
    """Points with a ratio; `level`: that at as many neurons, missing where the original
    has no neighbours to interpolate between; `worse`: there, beyond the interval's
    width."""
    original = points[points.model == ORIGINAL]
    known = dict(zip(original.neurons, original.perplexity, strict=True))
    found = points[points.ratio.notna()].copy()
    at_level = found.neurons.map(lambda n: log_interpolate(n, known) or float("nan"))
    found["level"] = found.perplexity / at_level
    margin = ((found.ratio_high - found.ratio_low) / 2).clip(lower=WORSE)
    found["value"] = found.level.fillna(found.ratio)
    found["worse"] = found.value > 1 + margin
    return found


def derive(tables: Tables) -> dict[str, Any]:
    """Ratios at the K of the paper's table, and what loses neuron for neuron."""
    table, curve = tables["points"], tables["curve"]
    found, of_curve = ratios(table), ratios(curve)
    original = table[table.model == ORIGINAL].set_index("k").perplexity
    first = next(k for k in (*SHOWN, *sorted(found.k)) if k in set(found.k))
    law = pd.concat([one.ratio[one.model == LG] for one in (found, of_curve)])
    relative = pd.concat([found, table[table.model == ORIGINAL].assign(ratio=1.0)])
    shown = found[found.k.isin(SHOWN if found.k.isin(SHOWN).any() else found.k)]
    return {
        "first": first,
        "at_first": found[found.k == first],
        "last": original.index.max(),
        "whole": original.iloc[-1] / original[first],
        "shown": shown,
        "relative": relative.filter(regex="^(model|k|ratio.*)$"),
        "levels": [found[["model", "k", "level"]], of_curve[["model", "k", "level"]]],
        "worse": found[found.worse],
        "worse_short": of_curve[of_curve.worse],
        "compared": found.level.notna().sum(),
        "checks": {LAW: bool((abs(law - 1) < EXACT).all())} if len(law) else {},
    }
