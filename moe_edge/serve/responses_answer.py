"""Answers of /v1/responses: items of thoughts, words and calls; a stream of events."""

import secrets
from collections.abc import Iterable
from typing import Any

from moe_edge.serve.answers import ChatAnswer, Chunk, data_line
from moe_edge.serve.errors import ApiError

Event = dict[str, Any]

# Kind of an item of text -> kind of its part, and the beginning of its events' names.
_PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class Items:
    """What a response consists of, and the events by which it came to be.

    Attributes:
      output: the items so far; the last one may still get text.
    """

    def __init__(self):
        self.output: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the item that gets text

    def feed(self, fields: Chunk) -> list[Event]:
        """Takes fields of a message that get more (`ChatAnswer`)."""
        events = []
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if fields.get(name):
                events += self._text(kind, fields[name])
        for call in fields.get("tool_calls", ()):
            events += self.close() + self._call(call)
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """No more text comes for the item that is open, if there is one."""
        if self._open is None:
            return []
        item, (_, named) = self.output[-1], _PARTS[self._open]
        item["status"], self._open = status, None
        part = item["content"][0]
        logprobs = {"logprobs": []} if item["type"] == "message" else {}
        at = self._at()
        return [
            at | {"type": f"{named}.done", "text": part["text"]} | logprobs,
            at | {"type": "response.content_part.done", "part": part},
            self._item("done"),
        ]

    def _text(self, kind: str, text: str) -> list[Event]:
        events, (part_kind, named) = [], _PARTS[kind]
        if self._open != kind:
            events = self.close() + self._begin(kind, part_kind)
        self.output[-1]["content"][0]["text"] += text
        logprobs = {"logprobs": []} if kind == "message" else {}
        return [
            *events,
            self._at() | {"type": f"{named}.delta", "delta": text} | logprobs,
        ]

    def _begin(self, kind: str, part_kind: str) -> list[Event]:
        self._open = kind
        more = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"id": _id(kind), "type": kind, "status": "in_progress", **more}
        self.output.append(item | {"content": []})
        added = self._item("added")
        part = {"type": part_kind, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        event = self._at() | {"type": "response.content_part.added", "part": part}
        self.output[-1]["content"] = [dict(part)]
        return [added, event]

    def _call(self, call: Chunk) -> list[Event]:
        """A call, which is known when it is whole."""
        function = call["function"]
        item = {"id": _id("function_call"), "type": "function_call"}
        item |= {"call_id": call["id"], "name": function["name"], "arguments": ""}
        self.output.append(item | {"status": "in_progress"})
        added, at = self._item("added"), self._at()
        del at["content_index"]
        self.output[-1] |= {"arguments": function["arguments"], "status": "completed"}
        named = "response.function_call_arguments"
        return [
            added,
            at | {"type": f"{named}.delta", "delta": function["arguments"]},
            at | {"type": f"{named}.done", "arguments": function["arguments"]},
            self._item("done"),
        ]

    def _at(self) -> Event:
        place = len(self.output) - 1
        id = self.output[-1]["id"]
        return {"item_id": id, "output_index": place, "content_index": 0}

    def _item(self, what: str) -> Event:
        place = len(self.output) - 1
        name = f"response.output_item.{what}"
        return {"type": name, "output_index": place, "item": dict(self.output[-1])}


def _id(kind: str) -> str:
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    return f"{prefix}_{secrets.token_hex(12)}"


class ResponsesAnswer(ChatAnswer):
    """Of a call of one row."""

    ID, LAST = "resp", b""

    def __init__(self, call, model):
        super().__init__(call, model)
        self._id = self._id.replace("-", "_")
        self._items, self._num_events = Items(), 0

    def body(self) -> Chunk:
        self._rest(0)
        return self._ended(0)

    def start(self) -> list[Event]:
        response = self._response("in_progress")
        return self._numbered(
            {"type": f"response.{name}", "response": response}
            for name in ("created", "in_progress")
        )

    def more_line(self, index: int) -> bytes | None:
        events = self._numbered(self._items.feed(self._new(index)))
        return b"".join(map(self.line, events)) or None

    def end(self, index: int) -> list[Event]:
        events = self._rest(index)
        response = self._ended(index)
        last = {"type": f"response.{response['status']}", "response": response}
        return self._numbered([*events, last])

    def usage_chunk(self) -> None:
        """None: the last event has the usage."""

    def line(self, chunk: Event) -> bytes:
        return b"event: %s\n%s" % (chunk["type"].encode(), data_line(chunk))

    def error_line(self, error: ApiError) -> bytes:
        said = {"code": error.code, "message": error.message, "param": error.param}
        (event,) = self._numbered([{"type": "error"} | said])
        return self.line(event)

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._num_events})
            self._num_events += 1
        return numbered

    def _new(self, index: int, is_last: bool = False) -> Chunk:
        return self._texts(index, self._take(index).text, is_last)

    def _rest(self, index: int) -> list[Event]:
        self._call.texts[index].finish()
        events = self._items.feed(self._new(index, is_last=True))
        is_cut = self._finish_reason(index) == "length"
        return events + self._items.close("incomplete" if is_cut else "completed")

    def _ended(self, index: int) -> Chunk:
        if self._finish_reason(index) != "length":
            return self._response("completed") | {"usage": self._usage()}
        why = {"incomplete_details": {"reason": "max_output_tokens"}}
        return self._response("incomplete") | why | {"usage": self._usage()}

    def _usage(self) -> Chunk:
        found = super()._usage()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            # Which of them are thoughts is not counted.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
            "moe_edge": found["moe_edge"],
        }

    def _response(self, status: str) -> Chunk:
        request = self._call.body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model.id,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": list(self._items.output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_new_tokens,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **request.given,
        }
