"""Measures a model: perplexity of a text, multiple choice, or logits of tokens.

python launch/evaluate.py --text FILE
python launch/evaluate.py --mcq sciq.jsonl,boolq.jsonl --data_dir ../shared/data/mcq
python launch/evaluate.py --tokens T.npy --logits L.npz --checkpoint DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("evaluate")
