"""Measures time per token over SMoE's a and chooses a for a budget of time.

python launch/study_tpot.py --gin_file configs/experiments/smoe_fig10.gin --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    common.define_device_memory(),
    flags.DEFINE_integer("rounds", None, "measured rounds, cases interleaved"),
    flags.DEFINE_integer("new_tokens", None, "generated after every prompt"),
    flags.DEFINE_float("tpot_budget_s", None, "for which a is chosen"),
)

if __name__ == "__main__":
    common.run("study_tpot", FLAGS)
