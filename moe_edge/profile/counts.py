"""Routing counts by domain, and which experts are chosen together."""

from collections.abc import Sequence

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
      domains: names of the N domains.
      domain_T: domain of every token.
      layer: id of the layer.
      top_k: experts that a token chooses.
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
