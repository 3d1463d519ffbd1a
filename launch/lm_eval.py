"""Runs tasks of the lm-evaluation-harness (extra `eval`).

python launch/lm_eval.py --tasks NAME --include_path FOLDER --checkpoint DIR
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_string("tasks", None, "names, separated by commas"),
    flags.DEFINE_string(
        "include_path", None, "folder of task files, and of the data they name"
    ),
    flags.DEFINE_integer("num_fewshot", None, "examples before each question"),
    flags.DEFINE_integer("limit", None, "at most so many rows of a task"),
    flags.DEFINE_integer("batch_size", None, "texts run together, default 8"),
    common.define_k(),
    common.define_device_memory(),
)

if __name__ == "__main__":
    common.run("lm_eval", FLAGS)
