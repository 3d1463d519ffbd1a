"""Measures this machine for the cost model; the result is usable as a preset.

moe-edge profile_machine --out_dir DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("profile_machine", __doc__)
