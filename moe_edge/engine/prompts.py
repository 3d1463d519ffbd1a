"""Prompts from files."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.core.json_reader import json_objects
from moe_edge.core.suggest import did_you_mean

# Of a prompt: its server in a cluster, and what data sets say of it.
PROMPT_KEYS = ("id", "prompt", "server", "task", "answer", "meta")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    id: str
    text: str


def check_text(where: str, text: str) -> None:
    """Raises RequestError for text that UTF-8 cannot hold, such as half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not UTF-8 text: {error.reason} at character {error.start}; "
            "expected whole characters"
        ) from error


def check_keys(where: str, row: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises RequestError for a key that means nothing: it may be a slip."""
    if strange := [key for key in row if key not in known]:
        raise RequestError(
            f"{where}: unknown key {strange[0]!r:.60}; "
            f"{did_you_mean(strange[0], known)}known: {', '.join(known)}; "
            "further facts go into `meta`"
        )


def read_prompts(path: str | Path, more_keys: Sequence[str] = ()) -> list[Prompt]:
    """Prompts of a JSON-lines file `{"id", "prompt"}`.

    Other keys of prompt files are accepted without effect (PROMPT_KEYS).

    Args:
      more_keys: accepted, too.
    Raises:
      RequestError: a bad line (named), an unknown key, an empty or repeated prompt id,
        no prompt.
    """
    prompts, seen = [], set()
    for where, row in json_objects(path, RequestError):
        check_keys(where, row, (*PROMPT_KEYS, *more_keys))
        for key in ("id", "prompt"):
            if not isinstance(row.get(key), str):
                raise RequestError(
                    f"{where}: {key!r} is {row.get(key)!r}, expected a string"
                )
        if not row["prompt"]:
            raise RequestError(f"{where}: the prompt is empty")
        if row["id"] in seen:
            raise RequestError(f"{where}: id {row['id']!r} occurs twice")
        seen.add(row["id"])
        prompts.append(Prompt(row["id"], row["prompt"]))
    if not prompts:
        raise RequestError(f"{path} holds no prompts; expected one JSON object a line")
    return prompts


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    max_positions: int,
    positions_end: str = "",
) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
      RequestError: a prompt that has no tokens.
      CapacityError: prompt and new tokens exceed the model's context.
    """
    rows = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        if not ids:
            raise RequestError(f"prompt {prompt.id!r} is empty; expected some text")
        if len(ids) + max_new_tokens > max_positions:
            raise CapacityError(
                f"prompt {prompt.id!r} has {len(ids)} tokens; with "
                f"max_new_tokens={max_new_tokens} it exceeds the model's context of "
                f"{max_positions}{f' ({positions_end})' if positions_end else ''}; "
                "shorten the prompt or ask for fewer tokens"
            )
        rows.append(ids)
    return rows
