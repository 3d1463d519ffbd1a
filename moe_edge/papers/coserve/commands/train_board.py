"""Trains the experts of a board of components (CoServe), or goes on with --out_dir.

moe-edge train_board --types 40 --out_dir W
moe-edge train_board --types 352 --trained_types 40 --out_dir W

About 10 s an expert on one core.
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("train_board", __doc__)
