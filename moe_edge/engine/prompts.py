"""Prompts from files, and text from tokens while they arrive."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.core.json_reader import json_objects
from moe_edge.core.suggest import did_you_mean

REPLACEMENT = "\ufffd"  # what a decoder gives for an unfinished character
# Of a prompt: its server in a cluster, and what data sets say of it.
PROMPT_KEYS = ("id", "prompt", "server", "task", "answer", "meta")
_MOST_HELD = 16  # tokens that wait for the rest of a character


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


class TextStream:
    """Turns tokens into text as they arrive, in time linear in their number.

    A token may hold part of a character, and some decoders drop the first space of
    a text. So a piece is the difference of two decodings that start at the same
    earlier token, and is held back while it ends in an unfinished character. The
    tokens of `context` (the prompt) stand before the text.

    Args:
      special: whether special tokens are text, too.

    Attributes:
      held: whole characters held back, before the unfinished one.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), special: bool = False
    ):
        decode = tokenizer.decode
        self._decode = functools.partial(decode, special=True) if special else decode
        self._ids = list(context[-8:])  # of both decodings
        self._shown = len(self._ids)  # tokens of the first one
        self._before = self._decode(self._ids)
        self.held = 0

    def push(self, token: int) -> str:
        """Text that is certain after one more token; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        piece = text[len(self._before) :]
        if piece and not piece.endswith(REPLACEMENT):
            self._move(len(self._ids))
            return piece
        if len(self._ids) - self._shown < _MOST_HELD:
            self.held = len(piece.rstrip(REPLACEMENT))
            return ""
        # Bytes of no character, or tokens without text: nothing may ever follow that
        # makes them one. An unfinished character has at most three tokens; a cut
        # before these, and not inside of a character, changes nothing.
        for end in range(len(self._ids) - 3, len(self._ids) - 7, -1):
            certain = self._decode(self._ids[:end])
            if text.startswith(certain):
                break
        else:
            end, certain = len(self._ids), text
        piece = certain[len(self._before) :]
        self._move(end)
        return piece

    def _move(self, end: int) -> None:
        """The first decoding now reaches from what was shown last to `end`."""
        self._ids, self._shown = self._ids[self._shown :], end - self._shown
        self._before, self.held = self._decode(self._ids[: self._shown]), 0

    def finish(self) -> str:
        """Text still held back when no token follows."""
        piece = self._decode(self._ids)[len(self._before) :]
        self._move(len(self._ids))
        return piece


def decode_after(
    tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]
) -> str:
    """Text of tokens that follow others: what a `TextStream` of them shows."""
    stream = TextStream(tokenizer, context)
    return "".join([stream.push(token) for token in tokens]) + stream.finish()
