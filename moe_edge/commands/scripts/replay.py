"""Replays a route trace through cache policies and predictors, without a model.

moe-edge replay --trace T.csv.gz --slots_per_layer 13,32,64 --out_dir DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("replay", __doc__)
