"""Measures a model: perplexity of a text, multiple choice, or logits of tokens.

moe-edge evaluate --text FILE
moe-edge evaluate --mcq sciq.jsonl,boolq.jsonl --data_dir ../shared/data/mcq
moe-edge evaluate --tokens T.npy --logits L.npz --checkpoint DIR
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("evaluate", __doc__)
