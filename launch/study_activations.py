"""Measures how unevenly neurons share the work inside experts (MoE-Prism fig. 3).

python launch/study_activations.py \
    --gin_file configs/experiments/moe_prism_fig3.gin \
    --data_dir ../shared/data --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_string("text", None, "UTF-8 files, [DOMAIN:]PATH with commas between"),
    flags.DEFINE_string("profile", None, "folder of a profile, instead of --text"),
    flags.DEFINE_integer("tokens", None, "of all domains together, default 131072"),
)

if __name__ == "__main__":
    common.run("study_activations", FLAGS)
