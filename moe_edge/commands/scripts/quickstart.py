"""Shows the default model at work in less than three minutes; needs no flags.

moe-edge quickstart
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("quickstart", __doc__)
