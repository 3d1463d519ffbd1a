"""gpt-oss: messages on channels, for thoughts, words and calls alike (harmony).

The package openai-harmony fetches its vocabulary from the network, so its format is
read here, as text whose special tokens are kept.
"""

import re
from collections.abc import Mapping, Sequence

from moe_edge.serve.markers import begun
from moe_edge.serve.tools.base import Dialect, Rules, Tool, ToolCall, call_of

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE = "<|message|>"
_BEGINS = ("<|channel|>", "<|start|>", "assistant", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(Dialect):
    """Its text is read by a `HarmonySplit`, which knows thoughts, too."""

    name = "harmony"
    mark = "<|channel|>"
    begin, end = "<|channel|>", "<|call|>"

    @property
    def markers(self) -> tuple[str, ...]:
        return "<|channel|>", _MESSAGE

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        header, _, arguments = text.partition(_MESSAGE)
        name = _RECIPIENT.search(header)
        return name and call_of(name[1], arguments, tools)

    def body(self, tool: Tool, rules: Rules) -> str:
        to = rules.literal(f"commentary to=functions.{tool.name} ")
        kind = f"{rules.literal('<|constrain|>')} {rules.literal('json')}"
        return f"{to} {kind} {rules.literal(_MESSAGE)} {rules.json(tool.parameters)}"

    def calls(self, tools: Sequence[Tool], is_parallel: bool, rules: Rules) -> str:
        """Of one call: `<|call|>`, an end-of-text token of these models, ends it."""
        begin = rules.literal(self.begin)
        calls = [rules.add(f"{begin} {self.body(tool, rules)}") for tool in tools]
        return " | ".join(calls)


class HarmonySplit:
    """Sorts the text of a row into what is thought, said and called."""

    def __init__(self, tools: Mapping[str, Tool]):
        self._tools = tools
        self._held = ""
        self._channel: str | None = None  # of the message; None: in a header
        self._header = ""

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str, list[ToolCall]]:
        """(thought, said, calls) of some more text."""
        self._held += text
        thought, said, calls = "", "", []
        while self._held:
            if self._channel is None and not self._open(is_last):
                break
            piece, is_over = self._body(is_last)
            if self._channel == "call":
                if not is_over:
                    break
                call = Harmony().read(self._header + _MESSAGE + piece, self._tools)
                if call is not None:
                    calls.append(call)
                elif piece:
                    said += self._header + _MESSAGE + piece
            elif self._channel == "analysis":
                thought += piece
            else:
                said += piece
            if not is_over:
                break
            self._channel = None
        return thought, said, calls

    def _open(self, is_last: bool) -> bool:
        """Whether a message has begun: a header is whole, or there is none."""
        held = self._held.lstrip()
        may_be = any(b.startswith(held) or held.startswith(b) for b in _BEGINS)
        header, found, rest = held.partition(_MESSAGE)
        if may_be and is_last and not found and held.startswith("<|"):
            self._held = ""  # cut before any words
            return False
        if not may_be or (is_last and not found):
            self._channel, self._header = "final", ""
            return True
        if not found:
            return False
        channel = _CHANNEL.search(header)
        self._channel = "call" if _RECIPIENT.search(header) else "final"
        if self._channel == "final" and channel is not None:
            self._channel = channel[1]
        self._header, self._held = header, rest
        return True

    def _body(self, is_last: bool) -> tuple[str, bool]:
        """Text of the message that is certain, and whether it is over."""
        ends = [at for end in _ENDS if (at := self._held.find(end)) >= 0]
        if ends:
            piece, self._held = self._held[: min(ends)], self._held[min(ends) :]
            if not self._held.startswith("<|start|>"):
                self._held = self._held.partition("|>")[2]
            return piece, True
        if self._channel == "call" and not is_last:
            return "", False
        most = 0 if is_last else max(begun(self._held, end) for end in _ENDS)
        size = len(self._held) - most
        piece, self._held = self._held[:size], self._held[size:]
        return piece, is_last
