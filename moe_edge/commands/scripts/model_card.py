"""Ships a training run: Hugging Face folder, model card, pictures.

moe-edge model_card --run_dir RUN --out_dir moe_edge/default_model --overwrite
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("model_card", __doc__)
