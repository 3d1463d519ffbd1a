"""The resident row of `compare`, in a process of its own: JSON in, JSON out."""

import json
import sys

from moe_edge.core.checks import RequestError
from moe_edge.core.json_reader import parse_json
from moe_edge.public.model import load


def main() -> None:
    """Reads what is asked from stdin, writes tokens and statistics to stdout."""
    asked = parse_json("stdin", sys.stdin.read(), RequestError)
    engine = load(asked["checkpoint"]).resident(max_batch=1)
    rounds, tokens = [], []
    for turn in range(asked["rounds"] + 1):  # the first compiles
        engine.reset()
        tokens = [
            engine.generate(ids, asked["max_new_tokens"], ignore_eos=True).tokens
            for ids in asked["rows"]
        ]
        if turn:
            rounds.append(engine.stats())
    print(json.dumps({"tokens": tokens, "rounds": rounds}))
