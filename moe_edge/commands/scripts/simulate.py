"""Simulates a cluster that serves one model, method by method.

moe-edge simulate --gin_file configs/examples/prism_bigbench_deepseek.gin \\
    --out_dir DIR
moe-edge simulate --cluster_run RUN --out_dir DIR

The second form does a run of `moe-edge cluster` again in computed time.
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("simulate", __doc__)
