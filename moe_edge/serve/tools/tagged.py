"""Dialects that write each argument between tags of its own."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moe_edge.serve.tools.base import Dialect, Rules, Tool, ToolCall, json_value

_KEY = r"[^<>\"]+?"  # an argument's name
_SPACE = r"\s*"


class Tagged(Dialect):
    r"""A value is JSON, or text where the schema says that it is a string.

    Lines may end between the parts.

    Attributes:
      head: what stands before the arguments, with %s for the tool in it.
      foot: what stands behind them.
      key: what stands before a value, with %s for the argument in it.
      close: what stands behind a value.
      is_padded: whether a value stands on lines of its own.
    """

    head: ClassVar[str]
    foot: ClassVar[str] = ""
    key: ClassVar[str]
    close: ClassVar[str]
    is_padded: ClassVar[bool] = False

    @property
    def opaque(self) -> str:
        """An argument: its value may hold any text but `close`."""
        key = _pattern(self.key, _KEY).pattern.removeprefix(_SPACE)
        return rf"{key}.*?(?:{re.escape(self.close)}|\Z)"

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        head = _pattern(self.head, r"[^\s<>\"]+").match(text)
        if head is None or head["name"] not in tools:
            return None
        tool, rest = tools[head["name"]], text[head.end() :]
        key, arguments = _pattern(self.key, _KEY), {}
        while (found := key.match(rest)) is not None:
            value, close, rest = rest[found.end() :].partition(self.close)
            if not close:
                return None
            if self.is_padded:
                value = value.removeprefix("\n").removesuffix("\n")
            schema = tool.schema_of(found["name"])
            arguments[found["name"]] = _value(value, schema.get("type"))
        if rest.strip() != self.foot:
            return None
        return ToolCall(tool.name, json.dumps(arguments, ensure_ascii=False))

    def body(self, tool: Tool, rules: Rules) -> str:
        parts = [rules.literal(self.head % tool.name)]
        required = tool.parameters.get("required") or ()
        for name in tool.parameters.get("properties") or {}:
            key = rules.literal(self.key % name)
            schema = tool.closed(tool.schema_of(name))
            part = rf"/\n?/ {key} {self._value_rule(schema, rules)}"
            parts.append(part if name in required else f"( {part} )?")
        return rf"/\n?/ {' '.join(parts)} /\n?/ {rules.literal(self.foot)} /\n?/"

    def _value_rule(self, schema: Mapping[str, Any], rules: Rules) -> str:
        pad, close = r"/\n?/" if self.is_padded else "", rules.literal(self.close)
        known = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if schema.get("type") != "string" or not isinstance(known, Sequence):
            return f"{pad} {rules.json(schema)} {pad} {close}"
        if known:
            texts = " | ".join(rules.literal(str(each)) for each in known)
            return f"{pad} ( {texts} ) {pad} {close}"
        return f"{pad} {rules.until(self.close)}"


def _pattern(text: str, name: str) -> re.Pattern:
    before, after = (re.escape(part) for part in text.split("%s"))
    return re.compile(rf"{_SPACE}{before}(?P<name>{name}){after}")


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    return json_value(text, otherwise=text)
