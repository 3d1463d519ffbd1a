"""Which server holds which expert: every placement method, side by side.

python launch/place_experts.py --statistics routing/expert_counts.jsonl --top_k 8 \\
  --model OLMoE-1B-7B-0924 --server_domains c4,github,book --slots 80,80,160 \\
  --data_dir ../shared/data --out_dir DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("place_experts")
