"""MoE-Prism, figure 3: how unevenly activations are spread inside experts.

Magnitudes depend on a model's scale, so each is also given relative to its expert's
mean. Two questions are kept apart. *Dynamic*: how few of its own neurons carry most of
a token's L1 norm, which a partition with a gate may use. *Static*: how much one fixed
set of neurons carries for all tokens, which pruning would keep as well, without a gate.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.bench.study import Findings
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.engine.weights import load_weights
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.moe_prism.studies.sparsity import (
    COVERED,
    MAGNITUDES,
    QUANTILES,
    TOP,
    Sparsity,
    at_top,
    gated_noise,
    measure,
    own_order,
)
from moe_edge.papers.moe_prism.studies.studies import PAPER_RATIO, RATIO, Fig3Settings
from moe_edge.profile.reader import Profile, open_profile

NOISE = "gated noise"
SPARSER = "in every layer, a token's own quarter carries more than in gated noise"
CLOSE = 0.1  # relative: noise with a ratio as near the paper's shows what is no proof
LIMITS = (
    "A small share of the L1 norm is no small effect on the output: outputs of neurons "
    "may cancel or add up. Perplexity at reduced K tells.",
    "The paper gives no share of the L1 norm, no static share and no control; they are "
    "ours.",
)
Experts = Mapping[int, Mapping[int, Sparsity]]  # by layer and expert
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


def run(settings: Fig3Settings) -> Findings:
    """Measures the sparsity of every expert's activations."""
    reader = open_checkpoint(settings.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        path = settings.profile or str(Path(folder) / "profile")
        if settings.profile is None:
            settings.make_profile(path)
        profile = open_profile(path)
        profile.check(reader.content_sha256())
        experts = measure_experts(profile, reader)
        return findings(profile, experts, settings.checkpoint, reader)


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
                experts[expert] = measure(rows, norm_F)
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


def metric_rows(experts: Experts) -> list[dict]:
    """Every measure, over all layers and in each."""
    groups = {"all layers": all_of(experts)}
    groups |= {f"layer {n}": [*layer.values()] for n, layer in experts.items()}
    rows = []
    for policy, group in groups.items():
        for name, value_of in MEASURES.items():
            values = [value_of(sparsity) for sparsity in group]
            spread = ("std over experts", float(np.std(values)))
            mean = float(np.mean(values))
            rows.append(metric(policy, name, mean, "1", len(values), spread))
    return rows


def explain(ratios_X: np.ndarray, noise: float) -> str:
    """What the ratio says next to the paper's, in words that follow from the numbers.

    Args:
      ratios_X: RATIO of every expert.
      noise: of gated noise.
    """
    mean, spread = np.mean(ratios_X), np.std(ratios_X)
    off, gap = abs(noise / PAPER_RATIO - 1), abs(mean - PAPER_RATIO)
    return (
        f"Gated noise, silu(g) * u of independent normal g and u, has {noise:.2f}, "
        f"{off:.0%} off the paper's"
        + (": the ratio alone is no proof of redundancy" if off < CLOSE else "")
        + f". Experts of the model measured here have {mean:.2f} on average and differ "
        f"{'more' if spread > gap else 'less'} among themselves (standard deviation "
        f"{spread:.2f}) than that from the paper's ({gap:.2f}); the table has every "
        "layer."
    )


def checks_of(experts: Experts, noise: Sparsity) -> dict[str, bool]:
    """What may be false: that experts are sparser than if they had learned nothing."""
    own_L = by_layer(experts, MEASURES[OWN])
    return {SPARSER: bool((own_L > MEASURES[OWN](noise)).all())}


def findings(profile: Profile, experts: Experts, checkpoint: str, reader) -> Findings:
    """The entry from what was measured."""
    # The paper shows one expert, without saying which: here the busiest of the middle.
    middle = profile.layers[len(profile.layers) // 2]
    busiest = max(experts[middle], key=lambda e: profile.tokens_of(middle, e))
    one, shown = f"layer {middle}, expert {busiest}", experts[middle][busiest]
    quantiles_Q, ratio = shown.quantiles_Q, float(MEASURES[RATIO](shown))
    noise = measure(gated_noise(profile.neurons), np.ones(profile.neurons))
    rows = metric_rows(experts)
    over_all = {r["name"]: r["value"] for r in rows if r["policy"] == "all layers"}
    of_noise = {name: MEASURES[name](noise) for name in (OWN, FIXED, RATIO)}
    rows += [metric(NOISE, name, value, "1") for name, value in of_noise.items()]
    rows += [
        metric(one, f"{quantile:.0%} quantile of the magnitude", value, "1")
        for quantile, value in zip(QUANTILES, quantiles_Q, strict=True)
    ]
    ratios_X = np.array([MEASURES[RATIO](s) for s in all_of(experts)])
    skipped = len(profile.layers) * profile.num_experts - ratios_X.size
    described = ("tokens", "window", "max_tokens_per_expert", "files", "layers")

    def percent(name: str, values=over_all) -> str:
        return f"{100 * values[name]:.0f} %"

    panels, curves = curves_of(profile, experts)
    return Findings(
        answer="The quarter of neurons that is largest for a token carries "
        f"{percent(OWN)} of its L1 norm; if neurons fired independently, "
        f"{percent(SHUFFLED)}; in gated noise, {percent(OWN, of_noise)}; one fixed "
        f"quarter {percent(FIXED)}.",
        details=[
            f"In one expert of the middle layer 75 % of magnitudes are below "
            f"{ratio:.2f} times the median (paper: {PAPER_RATIO:.2f}, gated noise: "
            f"{of_noise[RATIO]:.2f}).",
            explain(ratios_X, of_noise[RATIO]),
        ],
        model=describe_model(checkpoint, load_weights(reader), str(reader.dtype)),
        workload={name: profile.info[name] for name in described}
        | {"experts": ratios_X.size, "experts_with_too_few_tokens": skipped},
        metrics=rows,
        limits=[*LIMITS, f"{skipped} experts got fewer tokens than they have neurons."],
        seeds=profile.info["seeds"],
        baselines=[NOISE, "independent neurons", "one fixed quarter"],
        checks=checks_of(experts, noise),
        ours={
            "median magnitude": float(quantiles_Q[1]),
            "75th percentile of the magnitude": float(quantiles_Q[2]),
            RATIO: ratio,
            "of": one,
        },
        plot=lambda path: draw_panels(
            path,
            panels,
            title="Activations inside experts (MoE-Prism fig. 3)",
            columns=len(panels),
        ),
        files={"curves.json": json.dumps(curves, indent=1) + "\n"},
        summary={"own_quarter": over_all[OWN], "fixed_quarter": over_all[FIXED]},
    )


def curves_of(profile: Profile, experts: Experts) -> tuple[list[Panel], dict]:
    """The panels of the picture, and what is stored of them."""
    below_LM = by_layer(experts, lambda s: s.share_below_M)
    orders = {
        "a token's own order (dynamic)": by_layer(experts, lambda s: s.dynamic_F),
        "one order for all (static)": by_layer(experts, lambda s: s.static_F),
        "neurons shuffled over tokens": by_layer(experts, lambda s: s.shuffled_F),
    }
    lorenz = {label: curves_LF.mean(axis=0) for label, curves_LF in orders.items()}
    noise_TF = own_order(np.abs(gated_noise(profile.neurons)))
    names = [str(layer) for layer in profile.layers]
    shown = {  # the first and the last are named in the legend
        ("" if name in (names[0], names[-1]) else "_") + f"layer {name}": below_M
        for name, below_M in zip(names, below_LM, strict=True)
    }
    tops = {k: [at_top(row) for row in v] for k, v in orders.items()}
    lorenz[NOISE] = noise_TF.mean(axis=0)
    first_F = np.linspace(0, 1, profile.neurons + 1)
    panels = [
        Panel(
            "Magnitudes of all activations",
            "share of activations below",
            MAGNITUDES,
            shown,
            x_label="|activation| / mean of the expert",
            log_x=True,
        ),
        Panel(
            "L1 norm of a token, all layers",
            "share of the L1 norm",
            first_F,
            lorenz,
            x_label="share of neurons, in that order",
        ),
        Panel(
            f"L1 share of the first {100 * TOP:.0f} % of neurons",
            "share of the L1 norm",
            names,
            tops,
            x_label="layer",
            level=("even shares", TOP),
        ),
    ]
    stored = {
        "magnitudes": MAGNITUDES.tolist(),
        "share_below": dict(zip(names, below_LM.tolist(), strict=True)),
        "l1_share_of_first_neurons": {k: v.tolist() for k, v in lorenz.items()},
    }
    return panels, stored
