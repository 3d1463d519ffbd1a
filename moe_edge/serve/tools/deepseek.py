"""DeepSeek V3.1 and later: calls in one block, the name before its JSON."""

from moe_edge.serve.tools.base import NameFirst


class DeepSeek(NameFirst):
    name = "deepseek"
    mark = "<｜tool▁calls▁begin｜>"
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    middle = "<｜tool▁sep｜>"
