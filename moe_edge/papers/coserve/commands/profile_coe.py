"""Measures the experts of a graph on this machine, for `moe-edge coserve`.

moe-edge profile_coe --graph W/coe.json --out_dir P
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("profile_coe", __doc__)
