"""Trains the default model, or goes on with the training in --out_dir.

python launch/pretrain.py --out_dir results/local/default --max_minutes 60
"""

import os
import sys

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_integer("train_tokens", None, "where the run ends, default 10 M"),
    flags.DEFINE_integer("decay_tokens", None, "last tokens, with a falling rate"),
    flags.DEFINE_float("decay_minutes", None, "the same before --max_minutes"),
    flags.DEFINE_integer("warmup_tokens", None, "first tokens, with a rising rate"),
    flags.DEFINE_float("max_minutes", None, "save and stop after so long"),
    flags.DEFINE_float("learning_rate", None, "peak learning rate, default 2e-3"),
    flags.DEFINE_float("balance", None, "weight of the load-balancing loss"),
    flags.DEFINE_float("evenness", None, "weight of the loss on uneven top-k weights"),
    flags.DEFINE_float("expert_rate_factor", None, "on experts' rate, default 3"),
    flags.DEFINE_float("embedding_std", None, "of fresh embeddings, default 1"),
    flags.DEFINE_float("expert_scale", None, "factor on fresh experts, default 1.5"),
    flags.DEFINE_integer("batch_tokens", None, "tokens of a step, default 1024"),
    flags.DEFINE_float("checkpoint_minutes", None, "between checkpoints, default 5"),
    flags.DEFINE_float("evaluate_minutes", None, "between evaluations, default 10"),
    flags.DEFINE_integer("task_characters", None, "written by each task generator"),
    flags.DEFINE_integer("vocab_size", None, "of the tokenizer, default 4096"),
    flags.DEFINE_integer("d_model", None, "model width, a multiple of 32"),
    flags.DEFINE_integer("num_layers", None, "layers, default 6"),
    flags.DEFINE_integer("num_experts", None, "experts of a layer, default 64"),
    flags.DEFINE_integer("top_k", None, "experts of a token, default 8"),
    flags.DEFINE_integer("expert_dim", None, "neurons of an expert, default 64"),
    flags.DEFINE_integer("shared_dim", None, "neurons of the shared expert"),
    flags.DEFINE_bool("norm_topk", None, "weights of the chosen add up to 1"),
    flags.DEFINE_string("pause_file", None, "the run sleeps while this file exists"),
)
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def ask_for_huge_pages() -> None:
    """Starts again with glibc's huge pages, which it reads only at its start.

    Steps are about 30 % faster; see `moe_edge/core/heap.py`.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = _HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    ask_for_huge_pages()
    common.run("pretrain", FLAGS)
