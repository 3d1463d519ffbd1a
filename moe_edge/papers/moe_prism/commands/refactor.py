"""Refactors a model into one of sub-experts (MoE-Prism), or partitions one matrix.

moe-edge refactor --checkpoint default --profile P --sub_experts 4 --gate lg
    --out_dir R
moe-edge refactor --activations M.npy --sub_experts 4 --inactive 3 --out_dir D
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("refactor_model", __doc__)
