"""Refactors a model into one of sub-experts (MoE-Prism), or partitions one matrix.

python launch/refactor.py --checkpoint default --profile P --sub_experts 4 --gate lg
    --out_dir R
python launch/refactor.py --activations M.npy --sub_experts 4 --inactive 3 --out_dir D
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "model to split, either format, `default`"),
    flags.DEFINE_string("profile", None, "folder of launch/profile_model.py"),
    flags.DEFINE_string("activations", None, ".npy [tokens, neurons] instead of them"),
    flags.DEFINE_integer("sub_experts", None, "of each expert, default 4"),
    flags.DEFINE_string("gate", None, "lg (default), cg, or lg_ft with --train_text"),
    flags.DEFINE_integer("inactive", None, "of the objective, default sub_experts - 1"),
    flags.DEFINE_string(
        "solver", None, "alternate, magnitude, anneal, ..; default by gate"
    ),
    flags.DEFINE_integer("restarts", None, "of solver alternate"),
    flags.DEFINE_bool("normalise", None, "solve on neurons scaled to one mean"),
    flags.DEFINE_bool("weigh_neurons", None, "solve with down columns' lengths"),
    flags.DEFINE_bool("weigh_tokens", None, "solve with router weights"),
    flags.DEFINE_string("importance", None, "order: output (default), activation, .."),
    flags.DEFINE_string("proxy_rule", None, "cg: global (default) or pattern"),
    flags.DEFINE_integer(
        "gate_neurons", None, "cg: of a sub-expert; default by its width"
    ),
    flags.DEFINE_string("gate_choice", None, "cg: fitted (default) or central (paper)"),
    flags.DEFINE_float("heldout_ratio", None, "share of tokens not fitted on"),
    flags.DEFINE_integer("min_tokens", None, "with fewer, split by weights' norms"),
    flags.DEFINE_string("text", None, "held-out text; default: the packaged one"),
    flags.DEFINE_string("ppl_k", None, "K to measure: all (default), 4,8,12 or empty"),
    flags.DEFINE_integer("max_text_tokens", None, "read of the text, default 4096"),
    flags.DEFINE_string("train_text", None, "lg_ft: files, separated by commas"),
    flags.DEFINE_float("max_minutes", None, "lg_ft: pause training after so many"),
)

if __name__ == "__main__":
    common.run("refactor_model", FLAGS)
