"""Qwen3-Coder, Qwen 3.5 and 3.6: a function tag, a parameter tag for each argument."""

from moe_edge.serve.tools.tagged import Tagged


class QwenXml(Tagged):
    name = "qwen_xml"
    mark = "<function="
    begin, end = "<tool_call>", "</tool_call>"
    head, foot = "<function=%s>", "</function>"
    key, close = "<parameter=%s>", "</parameter>"
    is_padded = True
