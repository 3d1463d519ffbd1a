"""Serves requests on several processes that hold a model's experts together (Prism).

moe-edge cluster --servers 3 --prompts prompts.jsonl --max_new_tokens 48
moe-edge cluster --servers 3 --workload arithmetic,words,stories --period_s 5
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("cluster", __doc__)
