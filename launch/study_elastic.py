"""Runs one study of refactored models (MoE-Prism) and writes it as a results entry.

python launch/study_elastic.py --gin_file configs/experiments/moe_prism_table2.gin \
  --data_dir ../shared/data --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("name", None, "of the study, such as moe_prism_table2"),
    flags.DEFINE_string("checkpoint", None, "the parent, or `default` (default)"),
    flags.DEFINE_string("lg", None, "refactored with a linear gate"),
    flags.DEFINE_string("lg_ft", None, "the same, its router fine-tuned"),
    flags.DEFINE_string("cg", None, "refactored with a proxy gate"),
    flags.DEFINE_integer("max_tokens", None, "read of every text"),
    flags.DEFINE_integer("rounds", None, "measured rounds, cases interleaved"),
)

if __name__ == "__main__":
    common.run("study_elastic", FLAGS)
