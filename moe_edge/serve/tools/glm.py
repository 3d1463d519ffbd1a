"""GLM-4.5 and later: the name, then pairs of tags for each argument."""

from moe_edge.serve.tools.tagged import Tagged


class Glm(Tagged):
    name = "glm"
    mark = "<arg_key>"
    begin, end = "<tool_call>", "</tool_call>"
    head = "%s"
    key = "<arg_key>%s</arg_key>\n<arg_value>"
    close = "</arg_value>"
