"""Which tokens of an expert are kept: a uniform sample, the same at any batch size."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Tokens of one expert, in random order."""

    expert: int
    tokens_S: np.ndarray  # int64, index of the token
    ranks_S: np.ndarray  # int8, place of the expert among the token's chosen


def sample_tokens(
    ids_TK: np.ndarray, num_experts: int, max_tokens: int, seed: int, layer: int
) -> Iterator[Sample]:
    """At most `max_tokens` of every expert's tokens, each subset equally likely.

    A layer's choices are all known before anything is sampled, so no reservoir has to
    be updated token by token: the first rows of a random permutation of the expert's
    tokens have the same distribution, and depend on nothing but the text, the seed,
    the layer and the expert. Their order is random too: a prefix is again a sample.

    Args:
      ids_TK: int, chosen experts of every token, best first.
      num_experts: E; ids outside 0..E-1 are nobody's.
      max_tokens: of one expert.
      seed: of the choice.
      layer: id of the layer.
    Yields:
      a sample of each expert, in order.
    """
    top_k = ids_TK.shape[1]
    ids_P = ids_TK.ravel()
    order_P = np.argsort(ids_P, kind="stable")
    ends = np.searchsorted(ids_P[order_P], np.arange(num_experts + 1))
    for expert in range(num_experts):
        pairs = order_P[ends[expert] : ends[expert + 1]]
        rng = np.random.default_rng((seed, layer, expert))
        kept = pairs[rng.permutation(len(pairs))[:max_tokens]]
        yield Sample(expert, kept // top_k, (kept % top_k).astype(np.int8))
