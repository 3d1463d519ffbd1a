"""Mistral: a marker, the name, a marker, and the arguments as JSON."""

from collections.abc import Mapping

from moe_edge.serve.tools.base import Dialect, Rules, Tool, ToolCall, call_of


class Mistral(Dialect):
    name = "mistral"
    mark = begin = "[TOOL_CALLS]"
    end = ""
    middle = "[ARGS]"

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.middle

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        name, _, arguments = text.partition(self.middle)
        return call_of(name.strip(), arguments, tools)

    def body(self, tool: Tool, rules: Rules) -> str:
        name, middle = rules.literal(tool.name), rules.literal(self.middle)
        return f"{name} {middle} {rules.json(tool.parameters)}"
