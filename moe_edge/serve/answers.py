"""Bodies and stream chunks of completions and of chat.

answer = ChatAnswer(request, choices, model)
answer.body()                      # once all choices have ended

for chunk in answer.start(): ...   # or as a stream, `answer.line` of each
answer.more(choice)                # what is new of a choice; None: nothing
answer.more_line(choice)           # or its `line`, in an eighth of the time
for chunk in answer.end(choice): ...
answer.usage_chunk()               # if it was asked for; then `answer.LAST`
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_edge.serve.errors import ApiError
from moe_edge.serve.logprobs import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_tokens,
)
from moe_edge.serve.reading import MessageSplit
from moe_edge.serve.served_model import ServedModel
from moe_edge.serve.text_ends import Shown, TokenAt
from moe_edge.serve.token_request import TokenRequest
from moe_edge.serve.usage import usage_of

if TYPE_CHECKING:  # it loads JAX
    from moe_edge.serve.choices import Choice

Chunk = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
TOKEN_BYTES = 16  # about, of a token in an answer, or of a likely one beside it


def data_line(chunk: Chunk) -> bytes:
    """A chunk, or the body of an error, as an event of a stream.

    ASCII, for some clients split lines at characters such as U+2028.
    """
    return b"data: " + to_json(chunk) + b"\n\n"


def to_json(body: Chunk | str) -> bytes:
    """A body as it is sent."""
    return _ENCODE(body).encode("ascii")


class Answer:
    """What a request is answered with; a subclass knows the shape.

    A choice is either streamed (`more`, `end`) or in the body.
    """

    LAST = DONE  # line of a stream
    OBJECT = CHUNK_OBJECT = ID = ""
    TEXT = b""  # what stands before the text in a part of a stream

    def __init__(
        self, request: TokenRequest, choices: Sequence["Choice"], model: ServedModel
    ):
        self._request, self._choices, self._model = request, choices, model
        self._names = TokenNames(model.tokenizer)
        self._id, self._created = f"{self.ID}-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()  # choices of which something was taken
        self._around: dict[int, list[bytes]] = {}  # choice -> its line but for the text

    def body(self) -> Chunk:
        """The whole answer; all choices have ended."""
        choices = []
        for choice in self._choices:
            choice.ends.finish()
            choices.append(self._whole(choice, self._take(choice)))
        return self._frame(self.OBJECT, choices) | {"usage": self._usage()}

    def num_bytes(self, choice: "Choice") -> int:
        """About how much is new of a choice: long pieces are written in a thread."""
        request, tokens = self._request, choice.ends.num_new
        if request.top_logprobs is None:
            return TOKEN_BYTES * tokens
        if request.score_prompt and choice.index not in self._begun:
            tokens += len(choice.prompt.ids)
        return TOKEN_BYTES * tokens * (2 + request.top_logprobs)

    def start(self) -> list[Chunk]:
        """Chunks that come before any text."""
        return []

    def more(self, choice: "Choice") -> Chunk | None:
        """What is new of a choice that has one token or more."""
        shown = self._take(choice)
        return self._more(choice, shown) if shown.text or shown.tokens else None

    def more_line(self, choice: "Choice") -> bytes | None:
        """`data_line` of `more`: there is one for each token of each stream."""
        shown = self._take(choice)
        if not shown.text and not shown.tokens:
            return None
        if shown.tokens:
            return data_line(self._more(choice, shown))
        around = self._around.get(choice.index)
        if around is None:
            line = data_line(self._more(choice, Shown("", ())))
            # Once only: in the name of a model its quotes would be escaped.
            around = self._around[choice.index] = line.split(self.TEXT + b'""')
        before, after = around
        return b"".join((before, self.TEXT, to_json(shown.text), after))

    def _more(self, choice, shown: Shown) -> Chunk:
        return self._chunk([self._part(choice, shown, None)])

    def end(self, choice: "Choice") -> list[Chunk]:
        """The rest of a choice that has ended, and why it did."""
        choice.ends.finish()
        part = self._part(choice, self._take(choice), _finish_reason(choice))
        return [self._chunk([part])]

    def line(self, chunk: Chunk) -> bytes:
        """A chunk as it is sent."""
        return data_line(chunk)

    def error_line(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        return data_line(error.body())

    def usage_chunk(self) -> Chunk | None:
        """What follows the last choice; None if it was not asked for."""
        if not self._request.include_usage:
            return None
        return self._chunk([]) | {"usage": self._usage()}

    def _whole(self, choice, shown: Shown) -> Chunk:
        return self._part(choice, shown, _finish_reason(choice))

    def _part(self, choice, shown: Shown, reason: str | None) -> Chunk:
        raise NotImplementedError

    def _take(self, choice) -> Shown:
        """New text; what stands before the first one is part of it."""
        shown = choice.ends.take()
        if choice.index in self._begun:
            return shown
        self._begun.add(choice.index)
        return self._first(choice, shown)

    def _first(self, choice, shown: Shown) -> Shown:
        return shown

    def _chunk(self, choices: list[Chunk]) -> Chunk:
        chunk = self._frame(self.CHUNK_OBJECT, choices)
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _frame(self, kind: str, choices: list[Chunk]) -> Chunk:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.id,
            "choices": choices,
        }

    def _usage(self) -> Chunk:
        return usage_of(self._choices, silent=self._request.max_new_tokens == 0)


class CompletionAnswer(Answer):
    """Of /v1/completions; `text_offset` counts in the text of the choice."""

    OBJECT = CHUNK_OBJECT = "text_completion"
    ID, TEXT = "cmpl", b'"text":'

    def _first(self, choice, shown: Shown) -> Shown:
        tokens = ()
        if self._request.score_prompt:
            ids, scores = choice.prompt.ids, choice.row.prompt_scores
            tokens = prompt_tokens(ids, scores, self._model.tokenizer, choice.echo)
        return Shown(choice.echo + shown.text, (*tokens, *shown.tokens))

    def _part(self, choice, shown: Shown, reason: str | None) -> Chunk:
        wanted = self._request.top_logprobs is not None
        return {
            "index": choice.index,
            "text": shown.text,
            "logprobs": completion_logprobs(shown.tokens, self._names)
            if wanted
            else None,
            "finish_reason": reason,
        }


class ChatAnswer(Answer):
    """Of /v1/chat/completions; thoughts and calls are told apart."""

    OBJECT, CHUNK_OBJECT, ID = "chat.completion", "chat.completion.chunk", "chatcmpl"
    TEXT = b'"content":'

    def __init__(self, request, choices, model):
        super().__init__(request, choices, model)
        self._splits = {
            choice.index: MessageSplit(choice.prompt.reading)
            for choice in choices
            if choice.prompt.reading is not None
        }

    def start(self) -> list[Chunk]:
        return [
            self._chunk([self._delta(choice, {"role": "assistant", "content": ""})])
            for choice in self._choices
        ]

    def end(self, choice: "Choice") -> list[Chunk]:
        choice.ends.finish()
        rest = self.more(choice, is_last=True)
        last = self._chunk([self._delta(choice, {}, self._finish_reason(choice))])
        return [last] if rest is None else [rest, last]

    def more(self, choice: "Choice", is_last: bool = False) -> Chunk | None:
        shown = self._take(choice)
        texts = self._texts(choice, shown.text, is_last)
        if not texts and not shown.tokens:
            return None
        part = self._delta(choice, texts or {"content": ""})
        return self._chunk([part | {"logprobs": self._logprobs(shown.tokens)}])

    def more_line(self, choice: "Choice") -> bytes | None:
        if choice.index not in self._splits:
            return super().more_line(choice)
        chunk = self.more(choice)
        return None if chunk is None else data_line(chunk)

    def _texts(self, choice, text: str, is_last: bool = False) -> Chunk:
        """Fields of a message that get more text."""
        split = self._splits.get(choice.index)
        if split is None:
            return {"content": text} if text else {}
        return split.feed(text, is_last)

    def _whole(self, choice, shown: Shown) -> Chunk:
        message = {"role": "assistant", "content": "", "refusal": None}
        message |= self._texts(choice, shown.text, is_last=True)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            for call in calls:
                del call["index"]  # of a stream's
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(shown.tokens),
            "finish_reason": self._finish_reason(choice),
        }

    def _finish_reason(self, choice) -> str:
        split, reason = self._splits.get(choice.index), _finish_reason(choice)
        calls = split is not None and split.num_calls > 0
        return "tool_calls" if calls and reason == "stop" else reason

    def _part(self, choice, shown: Shown, reason: str | None) -> Chunk:
        part = self._delta(choice, {"content": shown.text}, reason)
        return part | {"logprobs": self._logprobs(shown.tokens)}

    def _delta(self, choice, delta: Chunk, reason: str | None = None) -> Chunk:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
        }

    def _logprobs(self, tokens: Sequence[TokenAt]) -> Chunk | None:
        wanted = self._request.top_logprobs is not None
        return chat_logprobs(tokens, self._names) if wanted else None


def _finish_reason(choice) -> str:
    return "stop" if choice.ended_by in ("eos", "stop") else "length"
