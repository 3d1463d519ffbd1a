"""Prompts of given lengths, cut out of real text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.checks import RequestError
from moe_edge.loadtest.offered import Offered

# Below a data folder, the first one that is there; else a text that we ship.
TEXTS = ("text/c4_web.txt", "text/wikitext-2/test.txt", "text/tinyshakespeare.txt")
OWN_TEXT = Path(__file__).parents[1] / "evaluate" / "held_out" / "books.txt"
CHARACTERS = 400_000  # that are read of it
PIECE = 50_000  # characters that are encoded at a time


class Prompts:
    """Token ids for requests, which begin at random places of a text.

    A block is its own number's place in the text, so that prompts which begin with the
    same blocks begin with the same tokens. Where the text ends, it begins again.

    Args:
      ids: of the text.
      block_tokens: of a block.
      seed: of the places.
    Raises:
      RequestError: no ids.
    """

    def __init__(self, ids: Sequence[int], block_tokens: int, seed: int = 0):
        if not len(ids):
            raise RequestError("the text of the prompts has no tokens")
        self._ids, self._block = np.asarray(ids, np.int64), block_tokens
        self._seed = seed

    def __call__(self, request: Offered) -> tuple[int, ...]:
        """The prompt of a request: `prompt_tokens` ids."""
        left, parts = request.prompt_tokens, []
        for block in request.blocks:
            parts.append(self._part(min(left, self._block), 1, block))
            left -= len(parts[-1])
            if not left:
                break
        if left:
            parts.append(self._part(left, 0, request.id))
        return tuple(np.concatenate(parts).tolist())

    def _part(self, count: int, *path: int) -> np.ndarray:
        start = np.random.default_rng([self._seed, *path]).integers(len(self._ids))
        return np.take(self._ids, np.arange(start, start + count), mode="wrap")


def text_pieces(data_dir: str | None) -> list[str]:
    """The text that prompts are cut from, in pieces that are encoded at a time."""
    below = [] if data_dir is None else [Path(data_dir) / name for name in TEXTS]
    path = next((path for path in below if path.is_file()), OWN_TEXT)
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(CHARACTERS)
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def text_ids(tokenizer, data_dir: str | None) -> list[int]:
    """Its ids, without special tokens between the pieces."""
    pieces = text_pieces(data_dir)
    rows = (tokenizer.encode(piece, begin=False, end=False) for piece in pieces)
    return [token for row in rows for token in row]
