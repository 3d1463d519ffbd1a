"""Continues prompts with a model.

python launch/generate.py --prompt "Once upon a time" --max_new_tokens 48
python launch/generate.py --prompt "Once" --device_memory 25% \
  --gin_file configs/policies/smoe.gin
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
    common.define_k(),
    common.define_device_memory(),
    flags.DEFINE_string("trace", None, "writes the routing to this .csv.gz file"),
    flags.DEFINE_bool("trace_scores", None, "also all experts' scores, beside it"),
    flags.DEFINE_string("events", None, "writes transfers and waits as JSON lines"),
)

if __name__ == "__main__":
    common.run("generate", FLAGS)
