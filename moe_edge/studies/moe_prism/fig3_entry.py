"""The results entry of MoE-Prism's figure 3: rows, words and the paper's numbers."""

import numpy as np

from moe_edge.engine.weights import load_weights
from moe_edge.metrics.results import Entry, metric
from moe_edge.profile.reader import Profile
from moe_edge.studies.moe_prism.sparsity import (
    COVERED,
    QUANTILES,
    Sparsity,
    at_top,
    gated_noise,
    measure,
)
from moe_edge.studies.quickstart.run import count_params
from moe_edge.studies.smoe.settings import claim

RATIO = "75th percentile / median of the magnitude"
PAPER = {
    "median magnitude": 0.0167,
    "75th percentile of the magnitude": 0.0391,
    RATIO: 0.0391 / 0.0167,
}
NOISE = "gated noise"
OVER_EXPERTS = "std over experts"
SPARSER = "in every layer, a token's own quarter carries more than in gated noise"
WHY = (
    "The paper's numbers are of one expert of DeepSeek-V2-Lite (1408 neurons), whose "
    "weights set the scale: only the ratio of its percentiles compares models. "
)
CLOSE = 0.1  # relative: noise with a ratio as near the paper's shows what is no proof
LIMITS = (
    "A small share of the L1 norm is no small effect on the output: outputs of neurons "
    "may cancel or add up. Perplexity at reduced K tells.",
    "The paper gives no share of the L1 norm, no static share and no control; they are "
    "ours.",
)
Experts = dict[tuple[int, int], Sparsity]  # of (layer, expert)
OWN, FIXED = "L1 share of a token's own top quarter", "L1 share of one fixed quarter"
SHUFFLED = "L1 share of the own top quarter if neurons fired independently"
MEASURES = {
    OWN: lambda s: at_top(s.dynamic_F),
    FIXED: lambda s: at_top(s.static_F),
    SHUFFLED: lambda s: at_top(s.shuffled_F),
    "share of activation x down norm, own top quarter": lambda s: at_top(
        s.dynamic_down_F
    ),
    f"neurons for {COVERED:.0%} of a token's L1 norm": lambda s: s.needed,
    "median / mean of the magnitude": lambda s: s.quantiles_Q[1] / s.mean,
    RATIO: lambda s: s.quantiles_Q[2] / s.quantiles_Q[1],
}


def by_layer(experts: Experts, value) -> np.ndarray:
    """Mean over the experts of every layer: [L] or, where values are curves, [L, M]."""
    layers = dict.fromkeys(layer for layer, _ in experts)
    return np.array(
        [
            np.mean([value(s) for key, s in experts.items() if key[0] == layer], axis=0)
            for layer in layers
        ]
    )


def metric_rows(experts: Experts) -> list[dict]:
    """Every measure, over all layers and in each."""
    groups = {"all layers": list(experts.values())}
    for (layer, _), sparsity in experts.items():
        groups.setdefault(f"layer {layer}", []).append(sparsity)
    rows = []
    for policy, group in groups.items():
        for name, value_of in MEASURES.items():
            values = [value_of(sparsity) for sparsity in group]
            spread = (OVER_EXPERTS, float(np.std(values)))
            mean = float(np.mean(values))
            rows.append(metric(policy, name, mean, "1", len(values), spread))
    return rows


def busiest_of_middle(found: Profile, experts: Experts) -> tuple[int, int]:
    """(layer, expert): the paper shows one expert, without saying which."""
    middle = found.layers[len(found.layers) // 2]
    return max(
        (key for key in experts if key[0] == middle),
        key=lambda key: found.tokens_of(*key),
    )


def explain(ratios_X: np.ndarray, noise: float) -> str:
    """Why the ratio differs from the paper's, in words that follow from the numbers.

    Args:
      ratios_X: RATIO of every expert.
      noise: of gated noise.
    """
    paper, mean, spread = PAPER[RATIO], np.mean(ratios_X), np.std(ratios_X)
    off = abs(noise / paper - 1)
    gap, order = abs(mean - paper), "more" if spread > abs(mean - paper) else "less"
    return (
        f"{WHY}Gated noise, silu(g) * u of independent normal g and u, has "
        f"{noise:.2f}, {off:.0%} off the paper's"
        + (": the ratio alone is no proof of redundancy" if off < CLOSE else "")
        + f". Experts of the model measured here have {mean:.2f} on average and differ "
        f"{order} among themselves (standard deviation {spread:.2f}) than that from "
        f"the paper's ({gap:.2f}); the table has every layer."
    )


def checks_of(experts: Experts, noise: Sparsity) -> dict[str, bool]:
    """What may be false: that experts are sparser than if they had learned nothing."""
    own_L = by_layer(experts, MEASURES[OWN])
    return {SPARSER: bool((own_L > MEASURES[OWN](noise)).all())}


def describe(
    found: Profile, experts: Experts, checkpoint: str, reader, started_s: float
) -> tuple[Entry, dict[str, float]]:
    """The entry of what was measured, and a summary."""
    at = busiest_of_middle(found, experts)
    policy, quantiles_Q = f"layer {at[0]}, expert {at[1]}", experts[at].quantiles_Q
    noise = measure(gated_noise(found.neurons), np.ones(found.neurons))
    noise_rows = [
        metric(NOISE, name, MEASURES[name](noise), "1") for name in (OWN, FIXED, RATIO)
    ]
    rows = [*metric_rows(experts), *noise_rows]
    for quantile, value in zip(QUANTILES, quantiles_Q, strict=True):
        name = f"{quantile:.0%} quantile of the magnitude"
        rows.append(metric(policy, name, value, "1"))
    over_all = {
        row["name"]: row["value"] for row in rows if row["policy"] == "all layers"
    }
    ours = {
        "median magnitude": float(quantiles_Q[1]),
        "75th percentile of the magnitude": float(quantiles_Q[2]),
        RATIO: float(quantiles_Q[2] / quantiles_Q[1]),
        "of": policy,
    }
    ratios_X = np.array([MEASURES[RATIO](s) for s in experts.values()])
    why = explain(ratios_X, MEASURES[RATIO](noise))
    skipped = len(found.layers) * found.num_experts - len(experts)
    weights = load_weights(reader)
    params = count_params(weights.config, weights.num_bytes, str(reader.dtype))
    described = ("tokens", "window", "max_tokens_per_expert", "files", "layers")
    entry = Entry(
        question="How much of an expert's work do few of its neurons carry (MoE-Prism "
        "fig. 3)?",
        answer="The quarter of neurons that is largest for a token carries "
        f"{_percent(over_all[OWN])} of its L1 norm; if neurons fired independently, "
        f"{_percent(over_all[SHUFFLED])}; in gated noise, "
        f"{_percent(at_top(noise.dynamic_F))}. One fixed quarter carries "
        f"{_percent(over_all[FIXED])}. In one expert of the middle layer 75 % of "
        f"magnitudes are below {ours[RATIO]:.2f} times the median (paper: "
        f"{PAPER[RATIO]:.2f}, gated noise: {MEASURES[RATIO](noise):.2f}).",
        model={
            "name": checkpoint,
            "params": params,
            "weights": "toy trained here" if checkpoint == "default" else "given",
        },
        workload={name: found.info[name] for name in described}
        | {"experts": len(experts), "experts_with_too_few_tokens": skipped},
        metrics=rows,
        limits=[*LIMITS, f"{skipped} experts got fewer tokens than they have neurons."],
        seeds=found.info["seeds"],
        baselines=[NOISE, "independent neurons", "one fixed quarter"],
        checks=checks_of(experts, noise),
        paper_claim=claim("MoE-Prism, section 2.2 and fig. 3", PAPER, ours, why),
        started_s=started_s,
    )
    return entry, {"own_quarter": over_all[OWN], "fixed_quarter": over_all[FIXED]}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
