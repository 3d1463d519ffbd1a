"""Measures how far lossy offloading is from the unmodified model: a fidelity card.

python launch/fidelity.py --checkpoint DIR --text FILE --device_memory 25%
python launch/fidelity.py --gin_file configs/policies/smoe.gin
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_string("text", None, "UTF-8 file; default: a packaged held-out book"),
    flags.DEFINE_string("device_memory", None, "budgets by commas: 15%,25%,50%"),
    flags.DEFINE_integer("rows", None, "pieces of the text, default 6"),
    flags.DEFINE_integer("prompt_tokens", None, "prefilled of each, default 64"),
    flags.DEFINE_integer("forced_tokens", None, "scored of each, default 192"),
)

if __name__ == "__main__":
    common.run("fidelity", FLAGS)
