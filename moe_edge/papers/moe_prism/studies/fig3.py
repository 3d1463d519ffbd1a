"""MoE-Prism, figure 3: how unevenly activations are spread inside experts.

Magnitudes depend on a model's scale, so each is also given relative to its expert's
mean. Two questions are kept apart. *Dynamic*: how few of its own neurons carry most of
a token's L1 norm, which a partition with a gate may use. *Static*: how much one fixed
set of neurons carries for all tokens, which pruning would keep as well, without a gate.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.engine.weights import load_weights
from moe_edge.metrics.frames import Estimate, Rows, Tables
from moe_edge.papers.moe_prism.studies.sparsity import (
    MAGNITUDES,
    QUANTILES,
    Sparsity,
    at_top,
    gated_noise,
    own_order,
)
from moe_edge.papers.moe_prism.studies.sparsity import measure as sparsity_of
from moe_edge.papers.moe_prism.studies.studies import Fig3Settings
from moe_edge.profile.reader import Profile, open_profile

NOISE = "gated noise"
SPARSER = "in every layer, a token's own quarter carries more than in gated noise"
PAPER_RATIO = 0.0391 / 0.0167  # fig. 3: 75th percentile over median
Experts = Mapping[int, Mapping[int, Sparsity]]  # by layer and expert
MEASURES = {  # shares of the L1 norm, of neurons, ratios of magnitudes
    "own": lambda s: at_top(s.dynamic_F),
    "fixed": lambda s: at_top(s.static_F),
    "shuffled": lambda s: at_top(s.shuffled_F),
    "down": lambda s: at_top(s.dynamic_down_F),
    "needed": lambda s: s.needed,
    "median_over_mean": lambda s: s.quantiles_Q[1] / s.mean,
    "ratio": lambda s: s.quantiles_Q[2] / s.quantiles_Q[1],
}


def measure(settings: Fig3Settings, rows: Rows) -> None:
    """Measures the sparsity of every expert's activations."""
    reader = open_checkpoint(settings.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        path = settings.profile or str(Path(folder) / "profile")
        if settings.profile is None:
            settings.make_profile(path)
        profile = open_profile(path)
        profile.check(reader.content_sha256())
        experts = measure_experts(profile, reader)
        tell(rows, profile, experts)
    counted = sum(map(len, experts.values()))
    skipped = len(profile.layers) * profile.num_experts - counted
    described = ("tokens", "window", "max_tokens_per_expert", "files", "layers")
    weights = load_weights(reader)
    rows.about |= {
        "model": describe_model(settings.checkpoint, weights, str(reader.dtype)),
        "workload": {name: profile.info[name] for name in described}
        | {"experts": counted, "experts_with_too_few_tokens": skipped},
        "seeds": profile.info["seeds"],
        "baselines": [NOISE, "independent neurons", "one fixed quarter"],
    }


def measure_experts(profile: Profile, reader) -> Experts:
    """Layer -> expert -> sparsity, of experts with as many rows as neurons.

    Raises:
      CapacityError: a layer has no such expert.
    """
    found: dict[int, dict[int, Sparsity]] = {layer: {} for layer in profile.layers}
    for layer, experts in found.items():
        records = reader.experts(layer)
        for expert in range(profile.num_experts):
            rows = profile.activations(layer, expert)
            if len(rows) >= max(2, profile.neurons):
                down_DF = reader.layout.part(records[expert], "down")
                norm_F = np.linalg.norm(down_DF.astype(np.float32), axis=0)
                experts[expert] = sparsity_of(rows, norm_F)
        if not experts:
            raise CapacityError(
                f"no expert of layer {layer} got {profile.neurons} tokens, as many as "
                "it has neurons; profile more --tokens"
            )
    return found


def all_of(experts: Experts) -> list[Sparsity]:
    """Of every layer."""
    return [one for of_layer in experts.values() for one in of_layer.values()]


def by_layer(experts: Experts, value) -> np.ndarray:
    """Mean over the experts of every layer: [L] or, where values are curves, [L, M]."""
    values = ([value(one) for one in layer.values()] for layer in experts.values())
    return np.array([np.mean(of_layer, axis=0) for of_layer in values])


def tell(rows: Rows, profile: Profile, experts: Experts) -> None:
    """Adds every measure over all layers, in each, and of noise; and the curves."""
    groups = {"all layers": all_of(experts)}
    groups |= {f"layer {n}": [*layer.values()] for n, layer in experts.items()}
    for of, group in groups.items():
        values = {m: [value_of(s) for s in group] for m, value_of in MEASURES.items()}
        rows("experts", of, **{m: over_experts(v) for m, v in values.items()})
    noise = sparsity_of(gated_noise(profile.neurons), np.ones(profile.neurons))
    of_noise = {m: float(MEASURES[m](noise)) for m in ("own", "fixed", "ratio")}
    rows("experts", NOISE, **of_noise)
    # The paper shows one expert, without saying which: here the busiest of the middle.
    middle = profile.layers[len(profile.layers) // 2]
    busiest = max(experts[middle], key=lambda e: profile.tokens_of(middle, e))
    shown = experts[middle][busiest].quantiles_Q
    for quantile, value in zip(QUANTILES, shown, strict=True):
        rows(
            "quantiles", f"layer {middle}, expert {busiest}", quantile, magnitude=value
        )
    below_LM = by_layer(experts, lambda s: s.share_below_M)
    for layer, below_M in zip(profile.layers, below_LM, strict=True):
        for magnitude, share in zip(MAGNITUDES, below_M, strict=True):
            rows("below", str(layer), magnitude, share=share)
    orders = {
        "a token's own order (dynamic)": lambda s: s.dynamic_F,
        "one order for all (static)": lambda s: s.static_F,
        "neurons shuffled over tokens": lambda s: s.shuffled_F,
    }
    curves = {o: by_layer(experts, value).mean(axis=0) for o, value in orders.items()}
    noise_TF = own_order(np.abs(gated_noise(profile.neurons)))
    curves[NOISE] = noise_TF.mean(axis=0)
    for order, curve_F in curves.items():
        first_F = np.linspace(0, 1, len(curve_F))
        for first, share in zip(first_F, curve_F, strict=True):
            rows("lorenz", order, first, share=share)


def over_experts(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation."""
    mean, std = float(np.mean(values)), float(np.std(values))
    return Estimate(mean, len(values), mean - std, mean + std, "std over experts")


def derive(tables: Tables) -> dict[str, Any]:
    """Shares over all layers, and how the ratio of the paper's percentiles lies."""
    experts, quantiles = tables["experts"].set_index("of"), tables["quantiles"]
    whole, noise = experts.loc["all layers"], experts.loc[NOISE]
    magnitude = quantiles.set_index("quantile").magnitude
    of_layers = experts[experts.index.str.startswith("layer ")]
    shares = of_layers[["own", "fixed", "shuffled"]].rename_axis(columns="order")
    return {
        "whole": whole[["own", "fixed", "shuffled"]].to_dict(),
        "noise": noise[["own", "ratio"]].to_dict(),
        "one": quantiles.of.iloc[0],
        "median": magnitude[0.5],
        "upper": magnitude[0.75],
        "one_ratio": magnitude[0.75] / magnitude[0.5],
        "noise_off": abs(noise.ratio / PAPER_RATIO - 1),
        "mean_ratio": whole.ratio,
        "among": (whole.ratio_high - whole.ratio_low) / 2,
        "from_paper": abs(whole.ratio - PAPER_RATIO),
        "by_layer": shares.stack().rename("share").reset_index(),
        "checks": {SPARSER: bool((of_layers.own > noise.own).all())},
    }
