"""The text of a row: what is certain of it by now, and why it ends."""

from collections.abc import Collection, Sequence

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.model.new_token import NewToken
from moe_edge.serve.text_ends import StopText, TextEnds


class RowText:
    """The text of a row, from its first new token to its end.

    Args:
      tokenizer: None where the checkpoint has none: there is no text then.
      prompt: token ids before the first new one.
      stop: texts that end it.
      eos_ids: tokens that end it.
      max_new_tokens: how many tokens end it.
    Attributes:
      reason: "stop" or "length"; of a row that goes on the latter.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str],
        eos_ids: Collection[int],
        max_new_tokens: int,
    ):
        self._left, self._eos_ids = max_new_tokens, eos_ids
        self._text: TextEnds | None = None
        if tokenizer is not None:
            stops = [StopText(text) for text in stop]
            self._text = TextEnds(
                tokenizer, context=[*prompt], stop=stops, eos_ids=eos_ids
            )
        self.reason = "length"

    def add(self, token: int) -> bool:
        """One more token; whether it is the last."""
        self._left -= 1
        if self._text is None:
            is_end = token in self._eos_ids
        else:
            is_end = self._text(NewToken(None, token)) is not None
        if is_end:
            self.reason = "stop"
        elif not self._left and self._text is not None:
            self._text.finish()
            if self._text.stopped:
                self.reason = "stop"
        return is_end

    def take(self) -> str:
        """Text that became certain since the last call."""
        return "" if self._text is None else self._text.take().text
