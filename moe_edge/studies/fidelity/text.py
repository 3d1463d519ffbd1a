"""The words and tables of a fidelity card."""

from collections.abc import Sequence
from typing import Any

from moe_edge.evaluate.weight_rules import rule_of
from moe_edge.metrics.results import metric

QUESTION = "How much do the lossy options change what model {name} says?"
LIMITS = (
    "Teacher-forced: each prediction is made on the text itself, so differences do not "
    "grow along a text as they would in free generation.",
    "Every row's prompt is prefilled, which is lossless in every mode.",
    "One model and one text: tolerance to substitution differs between models, so no "
    "value of a is safe for another.",
    "Agreement's interval takes tokens as independent (Wilson); that of the perplexity "
    "ratio resamples blocks of 32 tokens (bootstrap of paired differences).",
    "Rule `replaced` keeps the sum of a token's weights, so renormalising changes "
    "nothing there.",
)
SPREAD = "half of the 95 % interval"


def name_of(found: dict[str, Any]) -> str:
    """The option of a card in words."""
    if found["option"] == "substitute":
        return f"substitute a={found['a']:g}, {rule_of(found)}"
    if found["option"] == "drop":
        rule = "renormalised" if found["renormalise"] else "as they are"
        return f"drop below {found['threshold']:g}, {rule}"
    return "lossless offloading" if found["option"] == "topk" else found["option"]


def card_metrics(found: dict[str, Any]) -> list[dict]:
    """Agreement and perplexity ratio of a card."""
    where = f"{found['device_memory']}, " if "device_memory" in found else ""
    what = f"{where}batch {found['batch']}: {name_of(found)}"
    pairs = (
        ("agreement", "agreement", "agreement_interval95"),
        ("perplexity ratio", "perplexity_ratio", "ratio_interval95"),
    )
    rows = []
    for label, key, interval in pairs:
        low, high = found[interval]
        spread = (SPREAD, (high - low) / 2)
        rows.append(metric(what, label, found[key], "1", found["tokens"], spread))
    return rows


def is_shown(found: dict[str, Any], verdict, budgets: Sequence[str]) -> bool:
    """Whether the table has it: controls; dropping and the best rule, middle budget."""
    if found["control"]:
        return True
    if found["device_memory"] != budgets[len(budgets) // 2]:
        return False
    if found["option"] == "substitute":
        return rule_of(found) == verdict["best"]
    return True


def metric_rows(cards, verdict, budgets: Sequence[str]) -> list[dict]:
    """The entry's metrics; all cards are in cards.json."""
    rows = []
    if verdict is not None:
        for rule, means in verdict["rules"].items():
            what, n = f"weight rule {rule}, all settings", means["settings"]
            rows.append(
                metric(what, "mean size of change", means["moved_nats"], "nats", n)
            )
            rows.append(metric(what, "mean agreement", means["agreement"], "1", n))
            ratio = means["perplexity_ratio"]
            rows.append(metric(what, "mean perplexity ratio", ratio, "1", n))
    for found in cards:
        if is_shown(found, verdict, budgets):
            rows += card_metrics(found)
    return rows


def answer_of(cards, verdict, facts: dict[str, Any]) -> str:
    """One sentence: the best rule over a, the controls, the recommendation."""
    budgets = facts["budgets"]
    shown = [
        found
        for found in cards
        if found["option"] == "substitute"
        and not found["control"]
        and is_shown(found, verdict, budgets)
        and found["batch"] == cards[0]["batch"]
    ]
    curve = "; ".join(
        f"a={found['a']:g} agrees on {100 * found['agreement']:.1f} % of tokens, "
        f"perplexity x{found['perplexity_ratio']:.3f}"
        for found in shown[:: max(1, len(shown) - 1)]
    )
    half = cards[0]
    text = (
        f"On {facts['text']} with {budgets[len(budgets) // 2]} of the experts' bytes, "
        f"batch {half['batch']}: {curve or 'no substitution measured'}; in scale, "
        f"{half['option']} agree on {100 * half['agreement']:.1f} %, perplexity "
        f"x{half['perplexity_ratio']:.3f}"
    )
    if verdict is not None and len(verdict["rules"]) > 1:
        clear = "clearly" if verdict["clear"] else "within the noise"
        text += f"; weight rule that stays closest, {clear}: {verdict['best']}"
    return text + "."
