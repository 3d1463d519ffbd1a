"""Continues prompts with a model.

python launch/generate.py --prompt "Once upon a time" --max_new_tokens 48
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_multi_string("prompt", None, "text to continue; repeatable"),
    flags.DEFINE_string("prompts", None, "JSON-lines file {id, prompt}"),
    flags.DEFINE_integer("max_new_tokens", None, "per prompt, default 64"),
    flags.DEFINE_float("temperature", None, "0 = greedy (default)"),
    flags.DEFINE_integer("top_k", None, "keep the k likeliest tokens, 0 = all"),
    flags.DEFINE_float("top_p", None, "keep the likeliest tokens up to this mass"),
    flags.DEFINE_integer("batch_size", None, "prompts decoded together, default 8"),
)

if __name__ == "__main__":
    common.run("generate", FLAGS)
