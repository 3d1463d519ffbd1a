"""Prompts as users give them: a text, token ids, or a list of either."""

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_edge.core.checks import CapacityError, RequestError
from moe_edge.engine.prompts import check_text
from moe_edge.engine.session import check_prompts

if TYPE_CHECKING:
    from moe_edge.public.model import Model

Rows = list[Sequence[int]]
Encode = Callable[[str], Sequence[int]]


class PromptReader:
    """Makes checked token ids of the prompts of an engine.

    Args:
      model: whose tokens they are.
      max_context: of the engine; None: the model's.
    """

    def __init__(self, model: "Model", max_context: int | None):
        self._model, self._max_context = model, max_context

    def rows(self, prompts: Any, more: int = 0) -> tuple[Rows, bool]:
        """Token ids of prompts that go on by `more` tokens, and whether there is one.

        Raises:
          RequestError: nothing, or what is no text and no token of the model.
          CapacityError: more tokens than the context.
        """
        rows, is_one = self._read(prompts)
        longest, limit = max(map(len, rows)) + more, self._model.config.max_positions
        if longest > (self._max_context or limit):
            name, most = "model's context", self._model.config.context_words
            if self._max_context:
                name, most = "engine's max_context", str(self._max_context)
            raise CapacityError(
                f"prompt and new tokens are up to {longest} tokens, more than the "
                f"{name} of {most}; shorten the prompt or lower "
                "max_new_tokens"
            )
        return rows, is_one

    def one(self, prompt: Any, more: int = 0) -> Sequence[int]:
        """As `rows`, of one prompt."""
        return _only(self.rows(prompt, more)[0])

    def text(self, text: Any) -> Sequence[int]:
        """As `one`, of any length: what is read in windows."""
        return _only(self._read(text)[0])

    def _read(self, prompts: Any) -> tuple[Rows, bool]:
        model = self._model
        rows, is_one = read_prompts(prompts, lambda text: model.tokenizer.encode(text))
        check_prompts(rows, model.config.vocab_size)
        return rows, is_one


def _only(rows: Rows) -> Sequence[int]:
    if len(rows) != 1:
        raise RequestError(f"got {len(rows)} prompts, expected one; give each alone")
    return rows[0]


def read_prompts(given: Any, encode: Encode) -> tuple[list[Sequence[int]], bool]:
    """Token ids of each prompt, and whether there is one, not given as a list.

    Args:
      given: a text, token ids, or a list of them.
      encode: makes token ids of a text.
    Raises:
      RequestError: nothing, or something else. Ids are not compared with a vocabulary.
    """
    if hasattr(given, "__array__"):  # of NumPy, JAX or torch
        given = np.asarray(given)
        given = [*given] if given.ndim > 1 else given.tolist()
    if isinstance(given, str):
        return [_ids(0, given, encode)], True
    if not isinstance(given, (list, tuple, range)):
        raise RequestError(
            f"prompt is {given!r:.60}, expected a text, a list of token ids, or a list "
            "of prompts"
        )
    if len(given) == 0:
        raise RequestError("prompt is empty; expected at least one token or text")
    if any(isinstance(item, numbers.Number) for item in given):
        return [list(given)], True
    return [_ids(row, item, encode) for row, item in enumerate(given)], False


def _ids(row: int, prompt: Any, encode: Encode) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    check_text(f"prompt {row}", prompt)
    if not prompt:
        raise RequestError(f"prompt {row} is empty; expected some text")
    return encode(prompt)
