"""Chooses budget, policies and format of a model on this machine, and says why.

moe-edge plan --checkpoint default --device_memory 25% --tpot_ms 40 --out_dir DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("plan", __doc__)
