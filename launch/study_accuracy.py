"""Measures multiple-choice accuracy and fidelity over SMoE's a.

python launch/study_accuracy.py --gin_file configs/experiments/smoe_table4.gin \
    --data_dir ../shared/data --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    common.define_device_memory(),
    flags.DEFINE_integer("limit", None, "questions of each set, default 40"),
    flags.DEFINE_integer("max_tokens", None, "of a question and choice, default 128"),
    flags.DEFINE_integer("batch_size", None, "rows decoded together, default 3"),
    flags.DEFINE_string("text", None, "UTF-8 file; default: a packaged held-out book"),
)

if __name__ == "__main__":
    common.run("study_accuracy", FLAGS)
