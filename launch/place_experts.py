"""Which server holds which expert: every placement method, side by side.

python launch/place_experts.py --statistics routing/expert_counts.jsonl --top_k 8 \
  --model OLMoE-1B-7B-0924 --server_domains c4,github,book --slots 80,80,160 \
  --data_dir ../shared/data --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("statistics", None, "counts, JSON lines (expert_counts.jsonl)"),
    flags.DEFINE_string(
        "model", None, "of the statistics, if they hold several; else a preset"
    ),
    flags.DEFINE_integer("top_k", None, "of the statistics, if they hold several"),
    flags.DEFINE_string("server_domains", None, "one domain a server, by commas"),
    flags.DEFINE_string(
        "slots", None, "blocks that fit on each server, by commas; 80+80: two GPUs"
    ),
    flags.DEFINE_integer(
        "d_model", None, "of the statistics' model, if it is not a known one"
    ),
    flags.DEFINE_integer("expert_dim", None, "likewise, neurons of an expert"),
    flags.DEFINE_string("cluster", None, "preset of machines, instead of --slots"),
    flags.DEFINE_string("methods", None, "placers, by commas, or all (default)"),
)

if __name__ == "__main__":
    common.run("place_experts", FLAGS)
