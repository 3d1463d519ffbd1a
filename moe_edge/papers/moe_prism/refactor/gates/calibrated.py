"""Rows of the calibrated gate: what predicts a sub-expert's norm from the hidden state.

Ours. For every sub-expert ridge regression of the logarithm of its norm (L1, of its
activations times the lengths of their down columns) on the expert's input. Logarithms,
since norms spread over decades and only their order within a token counts. How strongly
coefficients are held down is chosen for each expert on a part of its tokens, and then
all are fitted on. A prediction of logarithms is that of a median; a block's bias moves
it to its mean norm, so that blocks of different experts compare.
"""

import numpy as np

from moe_edge.convert.refactored_router import LevelRows

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the mean variance of a coordinate
TRIED = 0.25  # of the tokens, on which the penalty is chosen
FLOOR = 1e-3  # of a block's mean norm: below it logarithms say nothing


def fit_rows(hidden_TD: np.ndarray, norms_TU: np.ndarray) -> LevelRows:
    """Rows of one expert.

    Args:
      hidden_TD: its inputs, in random order; norms_TU: from `linear.sub_norms`.
    """
    x_TD = np.asarray(hidden_TD, np.float64)
    mean_U = norms_TU.mean(axis=0, dtype=np.float64)
    floor_U = np.maximum(FLOOR * mean_U, np.finfo(np.float32).tiny)
    logs_TU = np.log(np.maximum(norms_TU, floor_U).astype(np.float64))
    tried = int(len(x_TD) * TRIED)
    penalty = PENALTIES[-1]
    if tried:
        weights, biases = _ridge(x_TD[tried:], logs_TU[tried:], PENALTIES)
        missed_P = [
            np.square(x_TD[:tried] @ w_DU + b_U - logs_TU[:tried]).sum()
            for w_DU, b_U in zip(weights, biases, strict=True)
        ]
        penalty = PENALTIES[int(np.argmin(missed_P))]
    (weight_DU,), (bias_U,) = _ridge(x_TD, logs_TU, (penalty,))
    predicted_TU = np.exp(x_TD @ weight_DU + bias_U)
    bias_U = bias_U + np.log(np.maximum(mean_U, floor_U) / predicted_TU.mean(axis=0))
    return LevelRows(weight_DU.T.astype(np.float32), bias_U.astype(np.float32))


def _ridge(x_TD, y_TU, penalties) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Coefficients [D, U] and constants [U] for each penalty."""
    mean_D, mean_U = x_TD.mean(axis=0), y_TU.mean(axis=0)
    centred_TD = x_TD - mean_D
    gram_DD = centred_TD.T @ centred_TD
    cross_DU = centred_TD.T @ (y_TU - mean_U)
    weights = [_solve(gram_DD, cross_DU, penalty) for penalty in penalties]
    return weights, [mean_U - mean_D @ weight_DU for weight_DU in weights]


def _solve(gram_DD, cross_DU, penalty: float) -> np.ndarray:
    """float64 [D, U] from sums over centred samples, the penalty relative to the mean
    variance."""
    # Half a second, which checking a study's settings need not wait for.
    from scipy.linalg import cho_factor, cho_solve

    D = len(gram_DD)
    scale = max(np.trace(gram_DD) / D, np.finfo(np.float64).tiny)
    held_DD = gram_DD + penalty * scale * np.eye(D)
    return cho_solve(cho_factor(held_DD), cross_DU)


def flat_rows(mean_U: np.ndarray, width: int) -> LevelRows:
    """Rows that predict the same of every token: of experts of too few tokens.

    Args:
      mean_U: mean norms of other experts' blocks.
    """
    bias_U = np.log(np.maximum(mean_U, np.finfo(np.float32).tiny))
    return LevelRows(
        np.zeros((len(mean_U), width), np.float32), bias_U.astype(np.float32)
    )
