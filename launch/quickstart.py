"""Shows the default model at work in less than three minutes; needs no flags.

python launch/quickstart.py
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_integer("max_new_tokens", None, "length of the story, default 64"),
    flags.DEFINE_integer("characters", None, "of each held-out text, default 6000"),
)

if __name__ == "__main__":
    common.run("quickstart", FLAGS)
