"""Measures a model: perplexity of a text, multiple choice, or logits of tokens.

python launch/evaluate.py --text FILE
python launch/evaluate.py --mcq sciq.jsonl,boolq.jsonl --data_dir ../shared/data/mcq
python launch/evaluate.py --tokens T.npy --logits L.npz --checkpoint DIR
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_string("text", None, "UTF-8 file whose perplexity is measured"),
    flags.DEFINE_string("dataset", None, "folder, local file or hub name, instead"),
    flags.DEFINE_string("split", None, "of the data set, default test"),
    flags.DEFINE_string("column", None, "of the data set, default text"),
    flags.DEFINE_string("dataset_config", None, "configuration name on the hub"),
    flags.DEFINE_string("mcq", None, "multiple-choice files, separated by commas"),
    flags.DEFINE_integer("limit", None, "at most so many rows or questions a file"),
    flags.DEFINE_string("tokens", None, ".npy file of token ids [B, S]"),
    flags.DEFINE_string("logits", None, ".npz file to write for --tokens"),
    flags.DEFINE_integer("window", None, "tokens, default min(512, context)"),
    flags.DEFINE_integer("stride", None, "tokens, default half a window"),
    flags.DEFINE_integer("batch_size", None, "windows run together, default 8"),
    common.define_k(),
    common.define_device_memory(),
)

if __name__ == "__main__":
    common.run("evaluate", FLAGS)
