"""Entropy of expert usage, from counts of router choices."""

import numpy as np

from moe_edge.core.checks import ConfigError


def usage_entropy(counts_NLE: np.ndarray) -> np.ndarray:
    """Entropy of each task's expert usage by layer, bits: log2(E) when uniform.

    Args:
      counts_NLE: how often each of N tasks chose each expert.
    Returns:
      float64 [N, L].
    Raises:
      ConfigError: a layer without any choice.
    """
    counts_NLE = np.asarray(counts_NLE, np.float64)
    total_NL1 = counts_NLE.sum(axis=-1, keepdims=True)
    if (total_NL1 <= 0).any():
        where = np.argwhere(total_NL1[..., 0] <= 0)[0].tolist()
        raise ConfigError(
            f"expert counts at {where} sum to 0, expected at least one choice in every "
            "layer; count more tokens"
        )
    share_NLE = counts_NLE / total_NL1
    safe_NLE = np.where(share_NLE > 0, share_NLE, 1.0)
    return -(share_NLE * np.log2(safe_NLE)).sum(axis=-1)
