"""Recall of predicted experts as OD-MoE counts it (arXiv 2512.03927, eqs. 2 and 3).

Of the experts that decode steps activated, the share that had been predicted. Steps are
rows; a prompt that has ended has no more rows. Prefill does not count.
"""

import numpy as np

from moe_edge.core.checks import ConfigError


def count_correct(actual_NLK: np.ndarray, predicted_NLM: np.ndarray) -> np.ndarray:
    """c(q, n, l): int `[N, L]`, chosen experts that were predicted.

    Args:
      actual_NLK: int experts, each once a layer; below 0: none (dense layers).
      predicted_NLM: the same, of as many rows and layers.
    """
    if actual_NLK.shape[:2] != predicted_NLM.shape[:2]:
        raise ConfigError(
            f"predictions of {predicted_NLM.shape[:2]} steps and layers, choices of "
            f"{actual_NLK.shape[:2]}; both must be of the same run"
        )
    found = actual_NLK[..., :, None] == predicted_NLM[..., None, :]
    return (found.any(axis=-1) & (actual_NLK >= 0)).sum(axis=-1)


def recall(actual_NLK: np.ndarray, predicted_NLM: np.ndarray) -> float:
    """Eq. 3: over all steps; NaN without any."""
    correct, chosen = count_correct(actual_NLK, predicted_NLM).sum(), actual_NLK >= 0
    return float(correct / chosen.sum()) if chosen.any() else float("nan")


def recall_by_index(
    index_N: np.ndarray, actual_NLK: np.ndarray, predicted_NLM: np.ndarray
) -> np.ndarray:
    """Eq. 2: float64 by output-token index; NaN where no prompt got that far.

    Args:
      index_N: int, of each row; 1 is the first decode step. Entry i of the result is
        that of index i + 1.
    """
    length = int(index_N.max(initial=0))
    correct_N = count_correct(actual_NLK, predicted_NLM).sum(axis=1)
    chosen_N = (actual_NLK >= 0).sum(axis=(1, 2))
    correct, chosen = (
        np.bincount(index_N - 1, weights, length) for weights in (correct_N, chosen_N)
    )
    return np.where(chosen > 0, correct / np.maximum(chosen, 1), np.nan)
