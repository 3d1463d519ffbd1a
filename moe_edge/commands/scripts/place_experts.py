"""Which server holds which expert: every placement method, side by side.

moe-edge place_experts --statistics routing/expert_counts.jsonl --top_k 8 \\
  --model OLMoE-1B-7B-0924 --server_domains c4,github,book --slots 80,80,160 \\
  --data_dir ../shared/data --out_dir DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("place_experts", __doc__)
