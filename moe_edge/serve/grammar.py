"""Answers that follow a grammar: which tokens may come next, by llguidance.

A request's schema, pattern or list of choices is compiled once, in a thread that reads
bodies; each of its rows then has a matcher of its own, which allows the tokens of the
next position (`engine/slot_rows.Guide`). Sizes and work are bounded, by a trial in a
process of its own too, so that no schema of a client holds up the engine.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.serve.errors import ApiError
from moe_edge.serve.grammar_trial import LIMITS, fault_of, first_fault
from moe_edge.serve.reasoning import Reasoning
from moe_edge.serve.tools.base import WHITE_SPACE

MOST_CHARACTERS = 65_536  # of a schema, pattern or all choices


class GrammarSpec(NamedTuple):
    """What a request asks its answer to be.

    Attributes:
      kind: "json", "regex", "choice" or "lark".
      value: a JSON schema; a pattern; the texts to choose from; a grammar.
      field: of the request, for messages.
    """

    kind: str
    value: Any
    field: str


class Grammars:
    """Compiles grammars over the tokens of one model.

    Args:
      vocab_size: of the model, whose logits are masked.
      eos_ids: tokens of which one ends every answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids, self._lock = tuple(eos_ids), threading.Lock()

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer | str:
        """The tokenizer as llguidance knows it; or why it does not."""
        if not self._eos_ids:
            return "the model has no end-of-text token to end an answer"
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=self._vocab_size,
                eos_token=list(self._eos_ids),
            )
        except ValueError as error:
            reason = str(error)[:200]
            return f"llguidance cannot read this model's tokenizer: {reason}"

    def prepare(self) -> llguidance.LLTokenizer | str:
        """Makes what all grammars share, better before requests come than with one.

        For a second, of 150,000 tokens, no other thread runs Python meanwhile.
        """
        with self._lock:
            return self._tokens

    def compile(self, spec: GrammarSpec) -> "Grammar":
        """Compiles what a request asks for; takes up to a second: call it in a thread.

        Raises:
          ApiError: unsupported_parameter: the model lacks what it needs;
            invalid_value: a schema or pattern that is too large, or of which some part
            is not known.
        """
        text = _text_of(spec)
        fault = fault_of(text)
        if fault is None:
            if isinstance(tokens := self.prepare(), str):
                raise _unsupported(tokens)
            limits = llguidance.LLParserLimits(**LIMITS)
            matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask is the slowest
            fault = first_fault(matcher)
        if fault is not None:
            raise ApiError(
                "invalid_value",
                f"{spec.field} cannot be enforced: {fault}",
                param=spec.field,
            )
        return Grammar(matcher, spec.field, self._tokenizer.token_bytes, self._eos_ids)


def _text_of(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form."""
    make = llguidance.LLMatcher
    if spec.kind in ("regex", "lark"):
        size, text = len(spec.value), spec.value
        is_regex = spec.kind == "regex"
        found = make.grammar_from_regex if is_regex else make.grammar_from_lark
    elif spec.kind == "choice":
        size = sum(map(len, spec.value))
        text = "start: " + " | ".join(json.dumps(each) for each in spec.value)
        found = make.grammar_from_lark
    else:
        text = json.dumps(spec.value)
        size = len(text)
        options = {"whitespace_pattern": WHITE_SPACE}
        found = functools.partial(make.grammar_from_json_schema, overrides=options)
    if size > MOST_CHARACTERS:
        raise ApiError(
            "invalid_value",
            f"{spec.field} has {size} characters, expected at most {MOST_CHARACTERS}",
            param=spec.field,
        )
    try:
        return found(text)
    except ValueError as error:
        raise ApiError(
            "invalid_value",
            f"{spec.field} cannot be enforced: {str(error)[:300]}",
            param=spec.field,
        ) from error


def _unsupported(reason: str) -> ApiError:
    return ApiError(
        "unsupported_parameter",
        f"answers cannot be made to follow a grammar here: {reason}",
        param="response_format",
    )


class Grammar:
    """A compiled grammar, of which rows get matchers."""

    def __init__(
        self,
        matcher,
        field: str,
        token_bytes: Callable[[int], bytes],
        eos_ids: Sequence[int],
    ):
        self._matcher, self._field = matcher, field
        self._token_bytes, self._eos_ids = token_bytes, eos_ids

    def guide(self, reasoning: Reasoning | None = None) -> "RowGuide":
        """The matcher of one row, at its beginning.

        Args:
          reasoning: of its prompt; a row that thinks first is free until it has,
            but for an end before the answer.
        """
        end = reasoning.markers.end if reasoning and reasoning.inside else None
        given = self._matcher, self._field, self._token_bytes, self._eos_ids
        return RowGuide(*given, end)


class RowGuide:
    """What one row may say next; a `slot_rows.Guide`.

    The engine's thread calls `fill` and `accept`. Of a grammar that becomes too complex
    on its way `failure` says why, and the row ends.

    Args:
      eos_ids: of which none comes before the grammar begins.
      after: the text after which the grammar begins; None: it begins at once.
    """

    def __init__(
        self,
        matcher,
        field: str,
        token_bytes: Callable[[int], bytes],
        eos_ids: Sequence[int],
        after: str | None = None,
    ):
        self._first, self._field, self._token_bytes = matcher, field, token_bytes
        self._eos_ids = eos_ids
        self._after, self._text = after and after.encode(), b""
        self._matcher = None  # copied when the row begins: many rows may wait

    def fill(self, bits_W: np.ndarray) -> None:
        """Writes the tokens that may come next: bit i % 32 of word i // 32."""
        if self._after is not None:
            bits_W[:] = ~np.uint32(0)
            for token in self._eos_ids:
                bits_W[token // 32] &= ~np.uint32(1 << token % 32)
            return
        if self._matcher is None:
            self._matcher = self._first.deep_copy()
        self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)

    def accept(self, token: int) -> None:
        """The row has this token."""
        if self._after is None:
            self._matcher.consume_token(token)
            return
        self._text = self._text[-len(self._after) :] + self._token_bytes(token)
        if self._after in self._text:
            self._after = None

    @property
    def failure(self) -> ApiError | None:
        """Why the answer does not follow the grammar; None as long as it does."""
        reason = self._matcher and first_fault(self._matcher)
        if reason is None:
            return None
        return ApiError(
            "invalid_value",
            f"{self._field} could not be enforced to the end: {reason}; simplify it",
            param=self._field,
        )
