"""Fits the routing generator to the measured domains (a few minutes, one core).

moe-edge fit_routing --data_dir ../shared/data \\
    --out moe_edge/workload/routing_domains.json
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("fit_routing", __doc__)
