"""The pieces of a text on which routes and kinds of weights are compared."""

from moe_edge.bench.fidelity.study import ForcedText
from moe_edge.evaluate.fidelity import cut_rows
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.texts import read_text


def forced_rows(settings: ForcedText, tokenizer) -> list[Forced]:
    """The pieces of the text."""
    return cut_rows(
        tokenizer.encode(read_text(settings.path), end=False),
        rows=settings.rows,
        prompt_tokens=settings.prompt_tokens,
        forced_tokens=settings.forced_tokens,
    )
