"""Gate neurons by regression: which few neurons predict a sub-expert's norm.

For each sub-expert, forward selection of r of its neurons for the least squares
prediction of its norm from their |activations| and a constant, then coefficients that
are not negative: a neuron's activation is part of the norm, so a negative one is
chance. One covariance matrix serves all steps: choosing a neuron removes what it
explains from the others (a Schur complement), so no regression is solved on the way.
"""

import numpy as np
from scipy.optimize import nnls

RIDGE = 1e-6  # of the largest variance: neurons may never fire, or be copies


def fit_neurons(
    activations_TF: np.ndarray, norms_TU: np.ndarray, labels_F: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chooses and weighs the gate neurons of one expert.

    Args:
      activations_TF: of tokens routed to the expert.
      norms_TU: what the gate predicts.
      labels_F: sub-expert of every neuron.
      count: r.
    Returns:
      int neurons `[U, r]`, best first; float32 scale `[U, r]` and prior `[U]` such that
      mean(scale x |activation|) + prior predicts the norm.
    """
    magnitude_TF = np.abs(activations_TF, dtype=np.float32)
    mean_F = magnitude_TF.mean(axis=0, dtype=np.float64)
    mean_U = norms_TU.mean(axis=0, dtype=np.float64)
    centred_TF = magnitude_TF - mean_F.astype(np.float32)
    cov_FF = (centred_TF.T @ centred_TF).astype(np.float64)
    cross_FU = (centred_TF.T @ (norms_TU - mean_U)).astype(np.float64)
    U = norms_TU.shape[1]
    members_Uf = np.argsort(labels_F, kind="stable").reshape(U, -1)
    cov_Uff = cov_FF[members_Uf[:, :, None], members_Uf[:, None, :]]
    cross_Uf = np.take_along_axis(cross_FU.T, members_Uf, axis=1)
    chosen_Ur = _select(cov_Uff, cross_Uf, count)
    scale_Ur = np.zeros(chosen_Ur.shape)
    for u, chosen in enumerate(chosen_Ur):
        scale_Ur[u] = _weigh(cov_Uff[u][np.ix_(chosen, chosen)], cross_Uf[u][chosen])
    neurons_Ur = np.take_along_axis(members_Uf, chosen_Ur, axis=1)
    prior_U = mean_U - (scale_Ur * mean_F[neurons_Ur]).sum(axis=1)
    return (
        neurons_Ur,
        (scale_Ur * count).astype(np.float32),  # the gate takes a mean
        prior_U.astype(np.float32),
    )


def _select(cov_Uff: np.ndarray, cross_Uf: np.ndarray, count: int) -> np.ndarray:
    """Forward selection in every sub-expert: int `[U, r]`."""
    cov_Uff, cross_Uf = cov_Uff.copy(), cross_Uf.copy()
    U = len(cov_Uff)
    rows = np.arange(U)
    floor_U1 = RIDGE * np.einsum("uff->uf", cov_Uff).max(axis=1, keepdims=True) + 1e-30
    chosen_Ur = np.empty((U, count), np.int64)
    taken_Uf = np.zeros(cross_Uf.shape, bool)
    for step in range(count):
        variance_Uf = np.einsum("uff->uf", cov_Uff)
        gain_Uf = np.square(np.maximum(cross_Uf, 0.0)) / np.maximum(
            variance_Uf, floor_U1
        )
        # A neuron that adds nothing is still better than one that is taken.
        best_U = np.where(taken_Uf, -1.0, gain_Uf).argmax(axis=1)
        chosen_Ur[:, step], taken_Uf[rows, best_U] = best_U, True
        row_Uf = cov_Uff[rows, best_U]
        pivot_U1 = np.maximum(variance_Uf[rows, best_U][:, None], floor_U1)
        cross_Uf -= row_Uf * (cross_Uf[rows, best_U][:, None] / pivot_U1)
        cov_Uff -= row_Uf[:, :, None] * (row_Uf / pivot_U1)[:, None, :]
    return chosen_Ur


def _weigh(cov_rr: np.ndarray, cross_r: np.ndarray) -> np.ndarray:
    """Least squares coefficients that are not negative."""
    ridge = RIDGE * cov_rr.diagonal().max() + 1e-30
    root_rr = np.linalg.cholesky(cov_rr + ridge * np.eye(len(cov_rr)))
    return nnls(root_rr.T, np.linalg.solve(root_rr, cross_r))[0]
