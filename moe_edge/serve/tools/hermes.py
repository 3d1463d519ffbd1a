"""Hermes, Qwen 2.5 and Qwen 3: a JSON object of name and arguments in tags."""

from collections.abc import Mapping

from moe_edge.serve.tools.base import (
    Dialect,
    Rules,
    Tool,
    ToolCall,
    call_of,
    read_object,
)


class Hermes(Dialect):
    name = "hermes"
    mark = begin = "<tool_call>"
    end = "</tool_call>"

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        found = read_object(text) or {}
        return call_of(found.get("name"), found.get("arguments", {}), tools)

    def body(self, tool: Tool, rules: Rules) -> str:
        schema = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        return rf"/\n?/ {rules.json(tool.closed(schema))} /\n?/"
