"""Ridge regression from sums, the penalty relative to the mean variance."""

import numpy as np
from scipy.linalg import cho_factor, cho_solve


def solve_ridge(
    gram_DD: np.ndarray, cross_DN: np.ndarray, penalty: float
) -> np.ndarray:
    """Coefficients float64 `[D, N]` of N targets.

    Args:
      gram_DD: products of centred inputs with each other, summed over samples.
      cross_DN: of centred inputs with targets.
      penalty: of the mean of the diagonal of `gram_DD`.
    """
    D = len(gram_DD)
    scale = max(np.trace(gram_DD) / D, np.finfo(np.float64).tiny)
    held_DD = gram_DD + penalty * scale * np.eye(D)
    return cho_solve(cho_factor(held_DD), cross_DN)
