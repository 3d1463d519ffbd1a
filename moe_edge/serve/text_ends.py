"""The text of a row while its tokens arrive, and whether it ends with one of them."""

import collections
from collections.abc import Collection, Sequence
from typing import NamedTuple

from moe_edge.convert.text_stream import TextStream
from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.model.new_token import NewToken, Score


class TokenAt(NamedTuple):
    """A token of a text, for its log probabilities."""

    token: int
    score: Score | None  # None: nothing comes before it
    offset: int  # in the text: where its first character begins


class Shown(NamedTuple):
    """A piece of an answer."""

    text: str
    tokens: tuple[TokenAt, ...]


class TextEnds:
    """What the driver tells every token of a row (`Request.ends`).

    Text is released as soon as no stop string can begin in it and its last character
    is whole. So the pieces of a stream join to the text of an answer that is not
    streamed: both are made here. A stop string counts from its last character on,
    whatever tokens it came in; of two that end there the longer one does.

    The engine's thread calls this object; any other one may `take` meanwhile, and
    calls `finish` once the row is over.

    Args:
      context: tokens before the first one: the prompt.
      stop: what ends the row; neither such a text nor what follows is shown.
      eos_ids: tokens that end it, unless `ignore_eos`.
      with_tokens: whether pieces name their tokens.
      silent: show nothing at all: only the prompt was asked for.
      special: whether special tokens are text, too.
      first: characters that stand before the text; offsets count from their first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int] = (),
        stop: Sequence["StopText"] = (),
        eos_ids: Collection[int] = (),
        ignore_eos: bool = False,
        with_tokens: bool = False,
        silent: bool = False,
        special: bool = False,
        first: int = 0,
    ):
        self._stream = TextStream(tokenizer, context, special)
        self._stops = [_Stop(each) for each in stop]
        self._eos_ids = frozenset(() if ignore_eos else eos_ids)
        self._with_tokens = with_tokens
        # Characters so far, and how many of them were released.
        self._made = self._released = first
        self._held = ""  # between the two
        self._tokens: collections.deque[TokenAt] = collections.deque()
        self._pieces: list[Shown] = []
        self._taken = 0
        self._over = silent
        self.stopped = False  # by a stop string

    def __call__(self, new: NewToken) -> str | None:
        """The row has one more token; why it ends, if it does."""
        if self._over:
            return None
        if new.token in self._eos_ids:
            self._add(self._stream.finish())
            if not self.stopped:
                self._note(new, self._made)
                self._end()
            return "stop" if self.stopped else "eos"
        self._note(new, self._made + self._stream.held)
        self._add(self._stream.push(new.token))
        return "stop" if self.stopped else None

    def finish(self) -> None:
        """No token follows: what was held back is released."""
        if not self._over:
            self._add(self._stream.finish())
            if not self.stopped:
                self._end()

    @property
    def num_new(self) -> int:
        """Pieces released since the last `take`: about a token each."""
        return len(self._pieces) - self._taken

    def take(self) -> Shown:
        """What was released since the last call."""
        new = self._pieces[self._taken :]
        self._taken += len(new)
        return Shown(
            "".join([piece.text for piece in new]),
            tuple(token for piece in new for token in piece.tokens),
        )

    def _note(self, new: NewToken, offset: int) -> None:
        if self._with_tokens:
            self._tokens.append(TokenAt(new.token, new.score, offset))

    def _add(self, text: str) -> None:
        """More text is certain, but for stop strings."""
        held = 0
        if self._stops:
            for i, letter in enumerate(text):
                found = max(stop.follow(letter) for stop in self._stops)
                if found:
                    self._held += text
                    self._made += i + 1
                    self._release(self._made - found)
                    self.stopped = self._over = True
                    return
            held = max(stop.matched for stop in self._stops)
        self._held += text
        self._made += len(text)
        self._release(self._made - held)

    def _release(self, end: int) -> None:
        """Shows the text up to a character, and the tokens that begin before it."""
        text = self._held[: end - self._released]
        if text:
            self._held, self._released = self._held[len(text) :], end
            self._pieces.append(Shown(text, self._tokens_before(end)))

    def _tokens_before(self, end: float) -> tuple[TokenAt, ...]:
        found = []
        while self._tokens and self._tokens[0].offset < end:
            found.append(self._tokens.popleft())
        return tuple(found)

    def _end(self) -> None:
        self._over = True
        self._pieces.append(Shown(self._held, self._tokens_before(float("inf"))))


class StopText:
    """A text that ends rows, ready to be looked for (Knuth-Morris-Pratt).

    Linear in what it is looked for in, however long it is and whatever it repeats.
    Rows share one: it does not change.
    """

    def __init__(self, text: str):
        self.text = text
        # For every length: the longest beginning that also is an end, but not all.
        self._shorter = [0, 0]
        for letter in text[1:]:
            self._shorter.append(self.next(self._shorter[-1], letter))

    def next(self, matched: int, letter: str) -> int:
        """How much of it a text ends with, one letter after it ended with `matched`."""
        while matched and self.text[matched] != letter:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == letter)


class _Stop:
    """How far a row's text has come in a stop text."""

    def __init__(self, stop: StopText):
        self._stop, self.matched = stop, 0

    def follow(self, letter: str) -> int:
        """The text goes on; the stop's length if it is complete now, else 0."""
        self.matched = self._stop.next(self.matched, letter)
        return self.matched if self.matched == len(self._stop.text) else 0
