"""Prompts that a plan is measured with: the user's, or texts of ours."""

from pathlib import Path

import numpy as np

from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import RequestError
from moe_edge.core.files import check_there
from moe_edge.engine.prompts import read_prompts
from moe_edge.training.generators import FAMILIES, documents

CHARACTERS_OF_A_TOKEN = 8  # more than a token has on average


def sampled_prompts(
    reader, count: int, tokens: int, seed: int, path: str | None = None
) -> tuple[list[list[int]], str]:
    """Prompts of one length, and what they are.

    Args:
      reader: of the checkpoint; without a tokenizer ids are drawn at random.
      count, tokens: how many, and how long.
      seed: other seeds give other prompts of the same kind.
      path: of the user's; each is cut, or continued by itself, to the length.
    Raises:
      RequestError: a bad file of prompts.
    """
    rng = np.random.default_rng(seed)
    if reader.tokenizer_path is None:
        if path is not None:
            raise RequestError(
                f"--prompts is {path!r} and {reader.path} has no tokenizer; leave it "
                "out: random tokens are used"
            )
        ids = rng.integers(0, reader.config.vocab_size, (count, tokens)).tolist()
        return ids, "random tokens (the checkpoint has no tokenizer)"
    tokenizer = load_tokenizer(reader)
    if path is not None:
        check_there(path, "--prompts")
        rows = [tokenizer.encode(each.text) for each in read_prompts(path)]
        first = int(rng.integers(len(rows)))
        rows = [rows[(first + i) % len(rows)] for i in range(count)]
        kind = f"prompts of {Path(path).name}"
    else:
        rows, names = [], list(FAMILIES)
        for i in range(count):
            family, key = names[i % len(names)], f"plan/{seed}/{i}"
            texts = documents(family, key, tokens * CHARACTERS_OF_A_TOKEN)
            rows.append(tokenizer.encode("\n\n".join(texts)))
        kind = "texts of our generators"
    cut = [(row * -(-tokens // len(row)))[:tokens] for row in rows]
    return cut, kind
