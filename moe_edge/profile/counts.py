"""What a layer's routing says: counts, experts chosen together, tokens to keep."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 4096  # tokens of a product: float32 counts exactly up to 2^24


def domain_counts(ids_TK, domain_T, num_domains: int, num_experts: int) -> np.ndarray:
    """int64 [domains, E]: how often each expert was among the chosen."""
    pair = domain_T[:, None].astype(np.int64) * num_experts + ids_TK
    size = num_domains * num_experts
    return np.bincount(pair.ravel(), minlength=size).reshape(num_domains, num_experts)


def coactivation(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [E, E]: tokens that chose both; the diagonal holds the counts."""
    both_EE = np.zeros((num_experts, num_experts), np.int64)
    for start in range(0, len(ids_TK), BLOCK):
        ids = ids_TK[start : start + BLOCK]
        chosen_TE = np.zeros((len(ids), num_experts), np.float32)
        np.put_along_axis(chosen_TE, ids, 1.0, axis=1)
        both_EE += (chosen_TE.T @ chosen_TE).astype(np.int64)
    return both_EE


def count_rows(
    model: str,
    domains: Sequence[str],
    domain_T: np.ndarray,
    layer: int,
    top_k: int,
    counts_NE: np.ndarray,
) -> list[dict]:
    """One line of `counts.jsonl` a domain: the schema of `expert_counts.jsonl`.

    Args:
      model: name of the checkpoint.
      domain_T: domain of every token.
      counts_NE: from `domain_counts`.
    """
    tokens_N = np.bincount(domain_T, minlength=len(domains))
    return [
        {
            "model": model,
            "domain": domain,
            "layer": layer,
            "num_experts": counts_NE.shape[1],
            "top_k": top_k,
            "tokens": int(tokens),
            "counts": counts_E.tolist(),
        }
        for domain, tokens, counts_E in zip(domains, tokens_N, counts_NE, strict=True)
    ]


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
      ids_TK: int, chosen experts of every token, best first; others than 0..E-1 are
        nobody's.
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
