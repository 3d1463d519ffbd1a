"""Continues prompts with a model.

moe-edge generate --prompt "Once upon a time" --max_new_tokens 48
moe-edge generate --prompt Once --gin_file smoe
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("generate", __doc__)
