"""Measures this machine for the cost model; the result is usable as a preset.

python launch/profile_machine.py --out_dir DIR
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("name", None, "of the machine, default this_machine"),
    flags.DEFINE_integer("d_model", None, "width of the block, default 2048"),
    flags.DEFINE_integer("expert_dim", None, "neurons of the block, default 1408"),
    flags.DEFINE_string("dtype", None, "float32 (default on CPU) or bfloat16"),
    flags.DEFINE_integer("most_tokens", None, "largest batch, default 256"),
    flags.DEFINE_integer("repeats", None, "rounds behind each median, default 5"),
)

if __name__ == "__main__":
    common.run("profile_machine", FLAGS)
