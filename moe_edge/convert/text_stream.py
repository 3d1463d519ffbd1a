"""Text from tokens while they arrive."""

import functools
from collections.abc import Sequence

from moe_edge.convert.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder gives for an unfinished character
_MOST_HELD = 16  # tokens that wait for the rest of a character


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
