"""Runs one study of expert offloading and writes it as a results entry.

python launch/study.py --gin_file configs/experiments/smoe_fig14.gin --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("name", None, "of the study, such as smoe_fig14"),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_integer("rounds", None, "measured rounds, cases interleaved"),
    flags.DEFINE_integer("prompt_tokens", None, "of every prompt"),
    flags.DEFINE_integer("new_tokens", None, "generated after every prompt"),
)

if __name__ == "__main__":
    common.run("study", FLAGS)
