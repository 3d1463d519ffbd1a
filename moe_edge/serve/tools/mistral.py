"""Mistral: a marker, the name, a marker, and the arguments as JSON."""

from moe_edge.serve.tools.base import NameFirst


class Mistral(NameFirst):
    name = "mistral"
    mark = begin = "[TOOL_CALLS]"
    end = ""
    middle = "[ARGS]"
