"""Bodies and stream chunks of completions and of chat.

answer = ChatAnswer(call, model)
answer.body()                      # once all rows have ended

for chunk in answer.start(): ...   # or as a stream, `answer.line` of each
answer.more(index)                # what is new of a row; None: nothing
answer.more_line(index)           # or its `line`, in an eighth of the time
for chunk in answer.end(index): ...
answer.usage_chunk()               # if it was asked for; then `answer.LAST`
"""

import functools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from moe_edge.serve.call import Call
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
from moe_edge.serve.usage import usage_of

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

    A row is either streamed (`more`, `end`) or in the body.
    """

    LAST = DONE  # line of a stream
    OBJECT = CHUNK_OBJECT = ID = ""
    TEXT = b""  # what stands before the text in a part of a stream

    def __init__(self, call: Call, model: ServedModel):
        self._call, self._model = call, model
        self._id, self._created = f"{self.ID}-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()  # rows of which something was taken
        self._around: dict[int, list[bytes]] = {}  # row -> its line but for the text

    @functools.cached_property
    def _names(self) -> TokenNames:
        return TokenNames(self._model.tokenizer)

    def body(self) -> Chunk:
        """The whole answer; all rows have ended."""
        choices = []
        for index in range(len(self._call.rows)):
            self._call.texts[index].finish()
            choices.append(self._whole(index, self._take(index)))
        return self._frame(self.OBJECT, choices) | {"usage": self._usage()}

    def num_bytes(self, index: int) -> int:
        """About how much is new of a row: long pieces are written in a thread."""
        request, tokens = self._call.body, self._call.texts[index].num_new
        if request.top_logprobs is None:
            return TOKEN_BYTES * tokens
        if request.score_prompt and index not in self._begun:
            tokens += len(self._call.prompt(index).ids)
        return TOKEN_BYTES * tokens * (2 + request.top_logprobs)

    def start(self) -> list[Chunk]:
        """Chunks that come before any text."""
        return []

    def more(self, index: int) -> Chunk | None:
        """What is new of a row that has one token or more."""
        shown = self._take(index)
        return self._more(index, shown) if shown.text or shown.tokens else None

    def more_line(self, index: int) -> bytes | None:
        """`data_line` of `more`: there is one for each token of each stream."""
        shown = self._take(index)
        if not shown.text and not shown.tokens:
            return None
        if shown.tokens:
            return data_line(self._more(index, shown))
        around = self._around.get(index)
        if around is None:
            line = data_line(self._more(index, Shown("", ())))
            # Once only: in the name of a model its quotes would be escaped.
            around = self._around[index] = line.split(self.TEXT + b'""')
        before, after = around
        return b"".join((before, self.TEXT, to_json(shown.text), after))

    def _more(self, index: int, shown: Shown) -> Chunk:
        return self._chunk([self._part(index, shown, None)])

    def end(self, index: int) -> list[Chunk]:
        """The rest of a row that has ended, and why it did."""
        self._call.texts[index].finish()
        part = self._part(index, self._take(index), self._finish_reason(index))
        return [self._chunk([part])]

    def line(self, chunk: Chunk) -> bytes:
        """A chunk as it is sent."""
        return data_line(chunk)

    def error_line(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        return data_line(error.body())

    def usage_chunk(self) -> Chunk | None:
        """What follows the last row; None if it was not asked for."""
        if not self._call.body.include_usage:
            return None
        return self._chunk([]) | {"usage": self._usage()}

    def _whole(self, index: int, shown: Shown) -> Chunk:
        return self._part(index, shown, self._finish_reason(index))

    def _part(self, index: int, shown: Shown, reason: str | None) -> Chunk:
        raise NotImplementedError

    def _take(self, index: int) -> Shown:
        """New text; what stands before the first one is part of it."""
        shown = self._call.texts[index].take()
        if index in self._begun:
            return shown
        self._begun.add(index)
        return self._first(index, shown)

    def _first(self, index: int, shown: Shown) -> Shown:
        return shown

    def _chunk(self, choices: list[Chunk]) -> Chunk:
        chunk = self._frame(self.CHUNK_OBJECT, choices)
        return chunk | {"usage": None} if self._call.body.include_usage else chunk

    def _frame(self, kind: str, choices: list[Chunk]) -> Chunk:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.id,
            "choices": choices,
        }

    def _usage(self) -> Chunk:
        return usage_of(self._call)

    def _finish_reason(self, index: int) -> str:
        natural = self._call.ended_by(index) in ("eos", "stop")
        return "stop" if natural else "length"


class CompletionAnswer(Answer):
    """Of /v1/completions; `text_offset` counts in the text of the row."""

    OBJECT = CHUNK_OBJECT = "text_completion"
    ID, TEXT = "cmpl", b'"text":'

    def _first(self, index: int, shown: Shown) -> Shown:
        call, tokens, echo = self._call, (), self._call.echo(index)
        if call.body.score_prompt:
            ids, scores = call.prompt(index).ids, call.rows[index].prompt_scores
            tokens = prompt_tokens(ids, scores, self._model.tokenizer, echo)
        return Shown(echo + shown.text, (*tokens, *shown.tokens))

    def _part(self, index: int, shown: Shown, reason: str | None) -> Chunk:
        wanted = self._call.body.top_logprobs is not None
        return {
            "index": index,
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

    def __init__(self, call, model):
        super().__init__(call, model)
        readings = ((i, call.prompt(i).reading) for i in range(len(call.rows)))
        self._splits = {i: MessageSplit(each) for i, each in readings if each}

    def start(self) -> list[Chunk]:
        return [
            self._chunk([self._delta(index, {"role": "assistant", "content": ""})])
            for index in range(len(self._call.rows))
        ]

    def end(self, index: int) -> list[Chunk]:
        self._call.texts[index].finish()
        rest = self.more(index, is_last=True)
        last = self._chunk([self._delta(index, {}, self._finish_reason(index))])
        return [last] if rest is None else [rest, last]

    def more(self, index: int, is_last: bool = False) -> Chunk | None:
        shown = self._take(index)
        texts = self._texts(index, shown.text, is_last)
        if not texts and not shown.tokens:
            return None
        part = self._delta(index, texts or {"content": ""})
        return self._chunk([part | {"logprobs": self._logprobs(shown.tokens)}])

    def more_line(self, index: int) -> bytes | None:
        if index not in self._splits:
            return super().more_line(index)
        chunk = self.more(index)
        return None if chunk is None else data_line(chunk)

    def _texts(self, index: int, text: str, is_last: bool = False) -> Chunk:
        """Fields of a message that get more text."""
        split = self._splits.get(index)
        if split is None:
            return {"content": text} if text else {}
        return split.feed(text, is_last)

    def _whole(self, index: int, shown: Shown) -> Chunk:
        message = {"role": "assistant", "content": "", "refusal": None}
        message |= self._texts(index, shown.text, is_last=True)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            for call in calls:
                del call["index"]  # of a stream's
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(shown.tokens),
            "finish_reason": self._finish_reason(index),
        }

    def _finish_reason(self, index: int) -> str:
        split, reason = self._splits.get(index), super()._finish_reason(index)
        calls = split is not None and split.num_calls > 0
        return "tool_calls" if calls and reason == "stop" else reason

    def _part(self, index: int, shown: Shown, reason: str | None) -> Chunk:
        part = self._delta(index, {"content": shown.text}, reason)
        return part | {"logprobs": self._logprobs(shown.tokens)}

    def _delta(self, index: int, delta: Chunk, reason: str | None = None) -> Chunk:
        return {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
        }

    def _logprobs(self, tokens: Sequence[TokenAt]) -> Chunk | None:
        wanted = self._call.body.top_logprobs is not None
        return chat_logprobs(tokens, self._names) if wanted else None
