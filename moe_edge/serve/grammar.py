"""Answers that follow a grammar: which tokens may come next, by llguidance.

A request's schema, pattern or list of choices is compiled once, in a thread that reads
bodies; each of its rows then has a matcher of its own, which allows the tokens of the
next position (`model/new_token.Guide`). Sizes and work are bounded, by a trial in a
process of its own too, so that no schema of a client holds up the engine.
"""

import functools
import json
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.serve.errors import ApiError, bad_value
from moe_edge.serve.grammar_trial import LIMITS, first_fault, try_grammar
from moe_edge.serve.reasoning import Reasoning
from moe_edge.serve.tools.base import WHITE_SPACE, Rules, enforced_part

MOST_CHARACTERS = 65_536  # of a schema, or of all choices
# Of a pattern, a choice or a text in a schema: the longer, the more time a mask takes
# (2 ms at 8,192 characters and a vocabulary of 150,000).
MOST_TEXT = 8192
MOST_OPEN_BYTES = 1 << 30  # of all grammars of requests that run or wait
MOST_BYTES = 1 << 28  # of one
LEAST_BYTES = 1 << 18  # that one counts
_QUOTED = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"')


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
        # Those of requests that run or wait, which share what is alike.
        self._open: weakref.WeakValueDictionary[tuple[str, str], Grammar]
        self._open = weakref.WeakValueDictionary()

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
            is not known; queue_full: too many large ones are open.
        """
        text = text_of(spec)
        if (found := self._open.get((spec.field, text))) is not None:
            return found
        fault, num_bytes = try_grammar(text)
        if num_bytes > MOST_BYTES:
            fault = f"it takes {num_bytes >> 20} MiB, expected {MOST_BYTES >> 20}"
        if fault is None:
            if isinstance(tokens := self.prepare(), str):
                raise _unsupported(tokens)
            limits = llguidance.LLParserLimits(**LIMITS)
            matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask is the slowest
            fault = first_fault(matcher)
        if fault is not None:
            raise bad_value(spec.field, f"{spec.field} cannot be enforced: {fault}")
        given = self._tokenizer.token_bytes, self._eos_ids, max(num_bytes, LEAST_BYTES)
        return self._opened((spec.field, text), Grammar(matcher, spec.field, *given))

    def _opened(self, key: tuple[str, str], grammar: "Grammar") -> "Grammar":
        """A grammar that counts from now on, or the same one that already does.

        Raises:
          ApiError: queue_full.
        """
        with self._lock:
            sizes = [each.num_bytes for each in self._open.values()]
            if sum(sizes) + grammar.num_bytes > MOST_OPEN_BYTES:
                raise ApiError(
                    "queue_full",
                    f"{len(sizes)} grammars of other requests leave no memory for "
                    f"{grammar.field}; try again later",
                    param=grammar.field,
                )
            return self._open.setdefault(key, grammar)


def text_of(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form.

    Raises:
      ApiError: invalid_value: it is too large, or cannot be read at all.
    """
    make = llguidance.LLMatcher
    if spec.kind == "regex":
        _check_size(spec.field, len(spec.value), MOST_TEXT)
        text, found = spec.value, make.grammar_from_regex
    else:
        found = make.grammar_from_lark
        if spec.kind == "choice":
            text = "start: " + " | ".join(map(json.dumps, spec.value))
        elif spec.kind == "lark":
            text = spec.value
        else:
            text = json.dumps(enforced_part(spec.value))
            more = {"overrides": {"whitespace_pattern": WHITE_SPACE}}
            found = functools.partial(make.grammar_from_json_schema, **more)
        _check_size(spec.field, len(text), MOST_CHARACTERS)
        longest = max(map(len, _QUOTED.findall(text)), default=0)
        _check_size(f"a text in {spec.field}", longest, MOST_TEXT)
    try:
        return found(text)
    except ValueError as error:
        raise bad_value(
            spec.field, f"{spec.field} cannot be enforced: {str(error)[:300]}"
        ) from error


def _check_size(what: str, size: int, most: int) -> None:
    if size > most:
        raise ApiError(
            "invalid_value",
            f"{what} has {size} characters, expected at most {most}",
            param=what.removeprefix("a text in "),
        )


def rule_of(spec: GrammarSpec, rules: Rules) -> str:
    """The name of a rule for what `spec` asks, in a grammar of more.

    Raises:
      ApiError: as `text_of`.
    """
    text_of(spec)
    makers = {"json": rules.json, "regex": rules.regex, "choice": rules.choice}
    return makers[spec.kind](spec.value)


def _unsupported(reason: str) -> ApiError:
    return ApiError(
        "unsupported_parameter",
        f"answers cannot be made to follow a grammar here: {reason}",
        param="response_format",
    )


class Grammar:
    """A compiled grammar, of which rows get matchers.

    Attributes:
      matcher: at its beginning.
      field: of the request, for messages.
      num_bytes: that it takes.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        field: str,
        token_bytes: Callable[[int], bytes],
        eos_ids: Sequence[int],
        num_bytes: int,
    ):
        self.matcher, self.field, self.num_bytes = matcher, field, num_bytes
        self.token_bytes, self.eos_ids = token_bytes, eos_ids

    def guide(self, reasoning: Reasoning | None = None) -> "RowGuide":
        """The matcher of one row, at its beginning.

        Args:
          reasoning: of its prompt; a row that thinks first is free until it has,
            but for an end before the answer.
        """
        end = reasoning.markers.end if reasoning and reasoning.inside else None
        return RowGuide(self, end)


class RowGuide:
    """What one row may say next; a `new_token.Guide`.

    The engine's thread calls `fill` and `accept`. Of a grammar that becomes too complex
    on its way `failure` says why, and the row ends.

    Args:
      grammar: that counts as open as long as this lives.
      after: the text after which the grammar begins, before which no row ends; None: it
        begins at once.
    """

    def __init__(self, grammar: Grammar, after: str | None = None):
        self._grammar = grammar
        self._after, self._text = after and after.encode(), b""
        self._matcher = None  # copied when the row begins: many rows may wait

    def fill(self, bits_W: np.ndarray) -> None:
        """Writes the tokens that may come next: bit i % 32 of word i // 32."""
        if self._after is not None:
            bits_W[:] = ~np.uint32(0)
            for token in self._grammar.eos_ids:
                bits_W[token // 32] &= ~np.uint32(1 << token % 32)
            return
        if self._matcher is None:
            self._matcher = self._grammar.matcher.deep_copy()
        self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)

    def accept(self, token: int) -> None:
        """The row has this token."""
        if self._after is None:
            self._matcher.consume_token(token)
            return
        self._text = self._text[-len(self._after) :] + self._grammar.token_bytes(token)
        if self._after in self._text:
            self._after = None

    @property
    def failure(self) -> ApiError | None:
        """Why the answer does not follow the grammar; None as long as it does."""
        reason = self._matcher and first_fault(self._matcher)
        if reason is None:
            return None
        field = self._grammar.field
        return bad_value(
            field, f"{field} could not be enforced to the end: {reason}; simplify it"
        )
