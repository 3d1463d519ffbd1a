"""How the text after a prompt of a conversation is read: thoughts, words, calls."""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.serve.reasoning import Reasoning, Split
from moe_edge.serve.tools.base import Dialect, Tool, ToolCall
from moe_edge.serve.tools.harmony import HarmonySplit
from moe_edge.serve.tools.split import ToolSplit


class Reading(NamedTuple):
    """What a text may hold beside words.

    Attributes:
      reasoning: how thoughts are marked; None: there are none.
      dialect: how calls are written; None: there are none.
      tools: that may be called, by name.
      is_parallel: whether more than one call is wanted.
      is_harmony: whether thoughts, words and calls are messages on channels.
    """

    reasoning: Reasoning | None = None
    dialect: Dialect | None = None
    tools: Mapping[str, Tool] = {}
    is_parallel: bool = True
    is_harmony: bool = False

    def needs_special(self, tokenizer: Tokenizer) -> bool:
        """Whether a marker is a special token, which texts leave out otherwise."""
        if self.is_harmony:
            return True
        markers = self.dialect.markers if self.dialect else ()
        if self.reasoning is not None:
            markers = (*markers, *self.reasoning.markers)
        return any(tokenizer.special_id(text.strip()) is not None for text in markers)


class MessageSplit:
    """Sorts the text of a row, as it comes, into the fields of a message."""

    def __init__(self, reading: Reading):
        self._harmony = HarmonySplit(reading.tools) if reading.is_harmony else None
        thoughts, dialect = reading.reasoning, reading.dialect
        self._thoughts = None if thoughts is None else Split(thoughts)
        self._calls = None if dialect is None else ToolSplit(dialect, reading.tools)
        self._is_parallel = reading.is_parallel
        self.num_calls = 0

    def feed(self, text: str, is_last: bool = False) -> dict[str, Any]:
        """Fields of the message that get more: texts, and a list of calls."""
        thought, calls = "", []
        if self._harmony is not None:
            thought, text, calls = self._harmony.feed(text, is_last)
            return self._fields(thought, text, calls)
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text, is_last)
        if self._calls is not None:
            text, calls = self._calls.feed(text, is_last)
        return self._fields(thought, text, calls)

    def _fields(self, thought: str, said: str, calls: list[ToolCall]) -> dict[str, Any]:
        if not self._is_parallel:
            calls = calls[: max(0, 1 - self.num_calls)]
        fields = {
            "reasoning_content": thought,
            "content": said,
            "tool_calls": [self._entry(call) for call in calls],
        }
        return {name: value for name, value in fields.items() if value}

    def _entry(self, call: ToolCall) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
