"""Removes the experts that matter least to the texts of a profile (REAP).

moe-edge profile_model --checkpoint default --text FILE --out_dir P
moe-edge prune --checkpoint default --profile P --remove 0.25 --out_dir D
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("prune", __doc__)
