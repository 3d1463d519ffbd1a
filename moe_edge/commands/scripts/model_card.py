"""Ships a training run: Hugging Face folder, model card, pictures.

python launch/model_card.py --run_dir RUN --out_dir moe_edge/default_model --overwrite
"""

from launch import common

if __name__ == "__main__":
    common.run("model_card")
