"""What lossy options change, per model and measured: a fidelity card.

Every option is compared with the unmodified resident model on the same forced tokens
of the same batches, next to two controls: the lossless offloaded engine, which must
agree in every bit, and half the experts, which puts the numbers in scale.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.bench.fidelity import quantised
from moe_edge.bench.fidelity.picture import Cards, plot
from moe_edge.bench.fidelity.rows import card_rows
from moe_edge.bench.fidelity.scorers import scorer_of
from moe_edge.bench.fidelity.study import FidelitySettings, reference_of
from moe_edge.bench.study import Findings
from moe_edge.engine.load import Loaded, load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import (
    RESAMPLES,
    RuleTally,
    compare,
    rule_of,
)
from moe_edge.evaluate.fidelity import Deferral, lossy_routes
from moe_edge.evaluate.stepwise import ForcedRun
from moe_edge.evaluate.texts import sha256_of
from moe_edge.metrics.results import interval_metric, metric
from moe_edge.route.base import ROUTES, Route, get_route

LIMITS = (
    "Teacher-forced: each prediction is made on the text itself, so differences do not "
    "grow along a text as they would in free generation.",
    "One model and one text: tolerance to substitution differs between models, so no "
    "value of a is safe for another.",
    "Agreement's interval takes tokens as independent (Wilson); that of the perplexity "
    "ratio resamples blocks of 32 tokens (bootstrap of paired differences).",
    "Rule `replaced` keeps the sum of a token's weights, so renormalising changes "
    "nothing there.",
)
STEPWISE = "Every row's prompt is prefilled, which is lossless in every mode."
LAYERWISE = (
    "All tokens pass a layer together, in the order of decode steps, one row after the "
    "other; each layer has its share of the slots. Nothing is prefilled."
)
DEFERRED = (
    "How many absent experts the rule `two_pointer` gives to the host follows costs "
    "that each start measures, so its row is of this machine; `all` takes every one. "
    "The last layer of a program does not defer."
)
IN_TURN = (
    "Options took turns, a batch of rows each. On a CPU the link is a copy in memory "
    "and the host's cores are the device's: such times say nothing of a GPU."
)
# What the lines of `_print_card` say.
HEAD = """\
budget, batch and option; agreement: share of tokens that the option and the full model
find likeliest alike; perplexity: as a multiple of the full model's; changed: share of
expert choices; hit ratio: share of the experts used that were on the device"""


def grid_of(settings: FidelitySettings) -> list[Route | Deferral]:
    """The lossy options that are measured, the user's own among them."""
    base, given = settings.base, (settings.a_values, settings.thresholds)
    grid: list[Route | Deferral] = [*lossy_routes(*given, settings.bonuses)]
    grid += map(Deferral, settings.deferred)
    own: list[Route | Deferral] = [get_route(base.route, **base.route_options)]
    own = [route for route in own if not route.lossless]
    own += [Deferral(base.assist)] if base.assist_deferred else []
    return grid + [choice for choice in own if choice not in grid]


def run(settings: FidelitySettings) -> Findings:
    """Measures every lossy option of a model, or what quantising it did."""
    reference = reference_of(settings)
    if reference is not None:
        return quantised.run(settings, reference)
    loaded, seed = load_engine(settings.checkpoint), settings.seed
    scorer = scorer_of(settings, loaded)
    resident, top_k = loaded.engine, loaded.engine.config.moe.top_k
    half = resident.at_k(max(1, top_k // 2))
    references, cards, tally = {}, [], RuleTally()
    for batch in settings.batch_sizes:
        references[batch] = scorer.plain(resident, batch)
        found = compare(scorer.plain(half, batch), references[batch], seed)
        name = f"{half.config.moe.top_k} of {top_k} experts"
        cards.append({"option": name, "control": True, "batch": batch, **vars(found)})
    print(HEAD, flush=True)
    for budget, options in settings.offloads.items():
        with scorer.budget(options) as measure:
            for batch in settings.batch_sizes:
                choices, lossless = [get_route("topk"), *grid_of(settings)], None
                for run, found in measure(choices, batch, references[batch]):
                    found |= {"batch": batch, "device_memory": budget}
                    found["control"] = found["option"] == "topk"
                    if settings.in_turn:
                        lossless = lossless or run
                        found |= pace(run, lossless, seed)
                    cards.append(found)
                    _print_card(found)
                    if has_rules(found):
                        tally.add(found, run, references[batch])
    return findings(cards, tally.verdict(seed), loaded, settings)


def pace(run: ForcedRun, lossless: ForcedRun, seed: int = 0) -> dict[str, Any]:
    """Time of a step over that of lossless offloading, which took turns with it: the
    median over batches of rows, and its 95 % interval (bootstrap over batches)."""
    ratio_N = np.array(run.step_s) / np.array(lossless.step_s)
    drawn_RN = np.random.default_rng(seed).choice(ratio_N, (RESAMPLES, ratio_N.size))
    low, high = np.quantile(np.median(drawn_RN, axis=1), (0.025, 0.975))
    found = {"step_ratio": float(np.median(ratio_N)), "batches": ratio_N.size}
    return found | {"step_interval95": (float(low), float(high))}


def _print_card(found: Mapping[str, Any]) -> None:
    print(
        f"{found['device_memory']:>6} batch {found['batch']}  {name_of(found):<36} "
        f"agreement {found['agreement']:.3f}, "
        f"perplexity x{found['perplexity_ratio']:.4f}, "
        f"changed {100 * found['changed_ratio']:.1f} %, "
        f"hit ratio {found['hit_ratio']:.3f}",
        flush=True,
    )


def has_rules(found: Mapping[str, Any]) -> bool:
    """Whether a card is of a route that compares rules for the weights."""
    return "weights" in found


def name_of(found: Mapping[str, Any]) -> str:
    """The option of a card in words."""
    if has_rules(found):
        strength = ROUTES[found["option"]].strength
        return f"{found['option']} {strength}={found[strength]:g}, {rule_of(found)}"
    if found["option"] == "drop":
        rule = "renormalised" if found["renormalise"] else "as they are"
        return f"drop below {found['threshold']:g}, {rule}"
    if found["option"] == Deferral.name:
        return f"{found['assist']} on the host, a layer later"
    if found["option"] == "prefer":
        return f"prefer by a bonus of {found['bonus']:g}"
    return "lossless offloading" if found["option"] == "topk" else found["option"]


def findings(
    cards: Cards, verdict, loaded: Loaded, settings: FidelitySettings
) -> Findings:
    """The entry of all cards; `verdict` is about the weight rules, None without any."""
    source = f"{settings.path.parent.name}/{settings.path.name}"
    budgets, half = list(settings.offloads), cards[0]
    middle = budgets[len(budgets) // 2]
    shown = [
        found
        for found in cards
        if found["control"]
        or found["option"] == Deferral.name
        or found["device_memory"] == middle
        and (not has_rules(found) or rule_of(found) == verdict["best"])
    ]
    curve = [
        found for found in shown if has_rules(found) and found["batch"] == half["batch"]
    ]
    ends = curve[:: max(1, len(curve) - 1)]
    late = [c for c in shown if c["option"] == Deferral.name]
    at = {"device_memory": middle, "batch": half["batch"]}
    late = [c for c in late if {**c, **at} == c]
    details = [f"Measured on {source}, batch {half['batch']}."]
    if verdict is not None and len(verdict["rules"]) > 1:
        clear = "clearly" if verdict["clear"] else "within the noise"
        details.append(f"Weight rule that stays closest, {clear}: {verdict['best']}.")
    sizes = ("rows", "prompt_tokens", "forced_tokens", "layerwise")
    title = f"{settings.checkpoint}: fidelity"
    return Findings(
        answer=f"With {middle} of the experts' bytes: {_answer(ends, late, half)}.",
        details=details,
        model=describe_model(settings.checkpoint, loaded.engine.weights, loaded.dtype),
        workload={
            "text": {"source": source, "sha256": sha256_of(settings.path)},
            **{name: getattr(settings, name) for name in sizes},
            "device_memory": budgets,
            "batch_sizes": list(settings.batch_sizes),
            "eviction": settings.base.eviction,
            "predictor": settings.base.predictor,
            "mode": settings.base.mode,
        },
        metrics=[*_rule_rows(verdict), *(row for c in shown for row in _card_rows(c))],
        limits=[
            LAYERWISE if settings.layerwise else STEPWISE,
            *((DEFERRED,) if any(c["option"] == Deferral.name for c in cards) else ()),
            *((IN_TURN,) if settings.in_turn else ()),
            *LIMITS,
        ],
        seeds=[settings.seed],
        baselines=["resident model", "lossless offloading", "half the experts"],
        checks=_control_checks(cards, settings.base),
        plot=lambda path: plot(path, cards, title=title),
        files={"cards.json": json.dumps(cards, indent=1) + "\n"},
        summary={"cards": cards, "weight_rule": verdict},
    )


def _answer(ends: Cards, late: Cards, half: Mapping[str, Any]) -> str:
    """What a card says in a sentence: of deferrals if there are any, else of
    substitution, beside half the experts."""
    if late:
        named = [(c["assist"], c) for c in late]
        named.append((f"in scale, {half['option']}", half))
        told = "; ".join(
            f"{name} {100 * c['agreement']:.1f} %, x{c['perplexity_ratio']:.3f}"
            for name, c in named
        )
        return (
            "agreement and perplexity ratio where the host's experts come a layer "
            f"late: {told}"
        )
    told = "; ".join(f"a={c['a']:g} {_agrees(c)}" for c in ends) or "no substitution"
    return f"{told}; in scale, {half['option']} {_agrees(half)}"


def _agrees(found: Mapping[str, Any]) -> str:
    return (
        f"agrees on {100 * found['agreement']:.1f} % of tokens, perplexity "
        f"x{found['perplexity_ratio']:.3f}"
    )


def _rule_rows(verdict: Mapping[str, Any] | None) -> list[dict]:
    """How the weight rules compare over all settings."""
    measures = {
        "moved_nats": ("mean size of change", "nats"),
        "agreement": ("mean agreement", "1"),
        "perplexity_ratio": ("mean perplexity ratio", "1"),
    }
    return [
        metric(
            f"weight rule {rule}, all settings", name, means[key], unit,
            means["settings"],
        )
        for rule, means in (verdict["rules"] if verdict else {}).items()
        for key, (name, unit) in measures.items()
    ]  # fmt: skip


def _card_rows(found: Mapping[str, Any]) -> list[dict]:
    """What a card says of fidelity and of the slots; all cards are in cards.json."""
    where = f"{found['device_memory']}, " if "device_memory" in found else ""
    what = f"{where}batch {found['batch']}: {name_of(found)}"
    rows = card_rows(what, found)
    if "hit_ratio" in found:
        rows.append(metric(what, "hit ratio", found["hit_ratio"], "1", found["tokens"]))
    if "step_ratio" in found:
        bounds = found["step_interval95"], found["batches"]
        name = "time of a step over lossless offloading's"
        rows.append(interval_metric(what, name, found["step_ratio"], *bounds))
        rows.append(metric(what, "step", 1e3 * found["step_s"], "ms", found["batches"]))
    return rows


def _control_checks(cards: Cards, base: OffloadOptions) -> dict[str, bool]:
    """The lossless control; what the host computes is summed in another order."""
    error = 0.0 if base.assist is None else 1e-4
    within = "exactly 1" if error == 0 else f"1 within {error:g}"
    return {
        f"lossless offloading agrees on every token, perplexity ratio {within}": all(
            card["agreement"] == 1 and abs(card["perplexity_ratio"] - 1) <= error
            for card in cards
            if card["option"] == "topk"
        )
    }
