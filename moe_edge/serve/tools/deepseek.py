"""DeepSeek V3.1 and later: calls in one block, the name before its JSON."""

from collections.abc import Mapping

from moe_edge.serve.tools.base import Dialect, Rules, Tool, ToolCall, call_of


class DeepSeek(Dialect):
    name = "deepseek"
    mark = "<｜tool▁calls▁begin｜>"
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    middle = "<｜tool▁sep｜>"

    @property
    def markers(self) -> tuple[str, ...]:
        return (*super().markers, self.middle)

    def read(self, text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
        name, _, arguments = text.partition(self.middle)
        return call_of(name.strip(), arguments, tools)

    def body(self, tool: Tool, rules: Rules) -> str:
        name, middle = rules.literal(tool.name), rules.literal(self.middle)
        return f"{name} {middle} {rules.json(tool.parameters)}"
