"""Ridge regression from sums, the penalty relative to the mean variance."""

import numpy as np


def solve_ridge(
    gram_DD: np.ndarray, cross_DN: np.ndarray, penalty: float
) -> np.ndarray:
    """Coefficients float64 `[D, N]` of N targets.

    Args:
      gram_DD: products of centred inputs with each other, summed over samples.
      cross_DN: of centred inputs with targets.
      penalty: of the mean of the diagonal of `gram_DD`.
    """
    # Half a second, which checking a study's settings need not wait for.
    from scipy.linalg import cho_factor, cho_solve

    D = len(gram_DD)
    scale = max(np.trace(gram_DD) / D, np.finfo(np.float64).tiny)
    held_DD = gram_DD + penalty * scale * np.eye(D)
    return cho_solve(cho_factor(held_DD), cross_DN)
