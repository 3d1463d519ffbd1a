"""Fits the routing generator to the measured domains (a few minutes, one core).

python launch/fit_routing.py --data_dir ../shared/data \\
    --out moe_edge/workload/routing_domains.json
"""

from launch import common

if __name__ == "__main__":
    common.run("fit_routing")
