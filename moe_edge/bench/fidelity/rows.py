"""The pieces of a text on which routes and kinds of weights are compared, and what an
entry says of a card."""

from collections.abc import Mapping
from typing import Any

from moe_edge.bench.fidelity.study import ForcedText
from moe_edge.evaluate.agreement import INTERVALS
from moe_edge.evaluate.fidelity import cut_rows
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.texts import read_text
from moe_edge.metrics.results import interval_metric


def forced_rows(settings: ForcedText, tokenizer) -> list[Forced]:
    """The pieces of the text."""
    return cut_rows(
        tokenizer.encode(read_text(settings.path), end=False),
        rows=settings.rows,
        prompt_tokens=settings.prompt_tokens,
        forced_tokens=settings.forced_tokens,
    )


def card_rows(what: str, card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Metrics of a card's agreement and perplexity ratio, with their intervals."""
    return [
        interval_metric(
            what, key.replace("_", " "), card[key], card[bounds], card["tokens"]
        )
        for key, bounds in INTERVALS.items()
    ]
