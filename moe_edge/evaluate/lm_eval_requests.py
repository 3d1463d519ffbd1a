"""What an lm-eval request asks of an engine; nothing here imports lm-eval.

`likelihood.score_rows` answers its likelihood requests, `generate_texts` its
generations.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.convert.text_stream import TextStream
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import CapacityError, RequestError, check_count
from moe_edge.core.progress import progress
from moe_edge.engine.generate import generate
from moe_edge.evaluate.likelihood import Forced

DEFAULT_NEW_TOKENS = 256  # lm-eval's own default
_LENGTH_NAMES = (
    *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
)
_IGNORED = ("do_sample", "temperature", "top_p", "top_k")  # of greedy decoding


def fit_target(context: list[int], wanted: list[int], max_positions: int) -> Forced:
    """Context and wanted tokens, cut at the left end where they exceed the model's.

    The model reads all but the last of them, at most `max_positions`.

    Raises:
      RequestError: nothing is wanted, or nothing stands before it.
      CapacityError: the wanted tokens alone exceed the context.
    """
    if not wanted or not context:
        raise RequestError(
            f"{len(context)} context and {len(wanted)} continuation tokens; expected "
            "at least one of each"
        )
    if len(wanted) > max_positions:
        raise CapacityError(
            f"a continuation of {len(wanted)} tokens exceeds the model's context of "
            f"{max_positions}; shorten it"
        )
    ids = (context + wanted)[-(max_positions + 1) :]
    return Forced(ids, len(ids) - len(wanted))


@dataclasses.dataclass(frozen=True)
class Ending:
    """When a generation ends: at the first stop text, or after so many tokens."""

    until: tuple[str, ...]
    max_new_tokens: int

    def cut(self, text: str) -> str | None:
        """The text before its first stop text, or None if there is none in it."""
        places = [text.find(stop) for stop in self.until]
        found = [place for place in places if place >= 0]
        return text[: min(found)] if found else None


def parse_ending(options: dict[str, Any], max_positions: int) -> Ending:
    """Reads a request's generation options.

    As in the harness `do_sample: false` is greedy at any temperature.

    Raises:
      RequestError: sampling, an unknown option, two lengths, or a bad value.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    if any(not isinstance(stop, str) for stop in until):
        raise RequestError(f"until is {until!r}, expected texts")
    default = min(DEFAULT_NEW_TOKENS, max_positions // 2)
    lengths = {name: options.pop(name, None) for name in _LENGTH_NAMES}
    lengths = {name: value for name, value in lengths.items() if value is not None}
    count = next(iter(lengths.values()), default)
    if any(value != count for value in lengths.values()):
        raise RequestError(f"{lengths} name more than one length; keep one of them")
    samples = options.get("do_sample")
    if samples is None:
        samples = options.get("temperature")
    if samples:
        raise RequestError(
            f"generation options {options} ask for sampling; only greedy decoding is "
            "offered: set do_sample to false and temperature to 0"
        )
    unknown = [name for name in options if name not in _IGNORED]
    if unknown:
        known = ", ".join(("until", *_LENGTH_NAMES, *_IGNORED))
        raise RequestError(f"unknown generation option {unknown[0]!r}; known: {known}")
    check_count("max_gen_toks", count)
    if count >= max_positions:
        raise CapacityError(
            f"max_gen_toks {count} leaves no room for a prompt in the model's context "
            f"of {max_positions}; ask for fewer"
        )
    return Ending(tuple(stop for stop in until if stop), count)


def generate_texts(
    engine,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    ending: Ending,
    batch_size: int,
) -> list[str]:
    """Greedy continuations, without their stop text.

    A prompt that leaves no room for the new tokens loses its left end.
    """
    room = engine.config.max_positions - ending.max_new_tokens
    rows = [prompt[-room:] for prompt in prompts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    texts: dict[int, str] = {}
    starts = range(0, len(order), batch_size)
    for start in progress(starts, "batches of texts generated"):
        batch = order[start : start + batch_size]
        found = _generate_batch(
            engine, tokenizer, [rows[i] for i in batch], ending, batch_size
        )
        texts |= dict(zip(batch, found, strict=True))
    return [texts[i] for i in range(len(rows))]


def _generate_batch(engine, tokenizer, rows, ending: Ending, size: int) -> list[str]:
    streams = [TextStream(tokenizer, row) for row in rows]
    texts, is_cut = [""] * len(rows), [False] * len(rows)

    def on_token(row: int, token: int) -> bool:
        if row >= len(rows):
            return True  # only fills up the batch
        if token in engine.config.eos_ids:
            return True
        texts[row] += streams[row].push(token)
        cut = ending.cut(texts[row])
        if cut is not None:
            texts[row], is_cut[row] = cut, True
        return is_cut[row]

    filled = [*rows, *([rows[0][:1]] * (size - len(rows)))]
    stop_ids = engine.config.eos_ids
    generate(
        engine, filled, ending.max_new_tokens, stop_ids=stop_ids, on_token=on_token
    )
    for row, stream in enumerate(streams):
        if not is_cut[row]:
            text = texts[row] + stream.finish()
            cut = ending.cut(text)
            texts[row] = text if cut is None else cut
    return texts
