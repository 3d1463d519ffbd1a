"""Ships a training run: Hugging Face folder, model card, pictures.

python launch/model_card.py --run_dir RUN --out_dir moe_edge/default_model --overwrite
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("run_dir", None, "folder of a training run"),
    flags.DEFINE_integer("eval_rows", None, "held-out sequences a domain, default 16"),
)

if __name__ == "__main__":
    common.run("model_card", FLAGS)
