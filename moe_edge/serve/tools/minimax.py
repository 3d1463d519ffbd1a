"""MiniMax-M2: invocations inside of one block, a parameter tag for each argument."""

from moe_edge.serve.tools.tagged import Tagged


class MiniMax(Tagged):
    name = "minimax"
    mark = "<minimax:tool_call>"
    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    begin, end = "<invoke", "</invoke>"
    head = ' name="%s">'
    key, close = '<parameter name="%s">', "</parameter>"
