"""The proxy gate without training: which neurons judge a sub-expert, and how.

MoE-Prism, section 4.3.1 ("central"). A token's most active neurons (the paper's top
3/4) make a binary matrix B, and B^T B counts how often two neurons are active together.
The centrality of a neuron is its sum over the other neurons of its sub-expert; the r
most central ones are gate neurons, and the mean of their |activation| stands for the
block's.

Ours ("fitted"): the r neurons from which the block's norm is predicted best, each with
a factor, and a prior of the block. Forward selection for the least squares prediction
of its norm from their |activations| and a constant, then coefficients that are not
negative: a neuron's activation is part of the norm, so a negative one is chance. One
covariance matrix serves all steps: choosing a neuron removes what it explains from the
others (a Schur complement), so no regression is solved on the way.
"""

import numpy as np
from scipy.optimize import nnls

from moe_edge.convert.refactored_router import Judges

ACTIVE_SHARE = 0.75  # of a token's neurons
RIDGE = 1e-6  # of the largest variance: neurons may never fire, or be copies


def stack_judges(experts: list[Judges]) -> Judges:
    """Those of a layer's experts as one, with a leading axis E."""
    return Judges(*(np.stack(parts) for parts in zip(*experts, strict=True)))


def coactivation(activations_TF: np.ndarray) -> np.ndarray:
    """Tokens in which two neurons are both among the most active: `[F, F]`."""
    F = activations_TF.shape[1]
    active = max(1, round(ACTIVE_SHARE * F))
    magnitude_TF = np.abs(activations_TF)
    most_TK = np.argpartition(magnitude_TF, F - active, axis=1)[:, F - active :]
    mask_TF = np.zeros(activations_TF.shape, np.float32)
    np.put_along_axis(mask_TF, most_TK, 1.0, axis=1)
    return mask_TF.T @ mask_TF


def central_neurons(
    activations_TF: np.ndarray, labels_F: np.ndarray, subs: int, count: int
) -> np.ndarray:
    """Ids of the most central neurons of every sub-expert: int `[U, r]`, best first."""
    together_FF = coactivation(activations_TF)
    np.fill_diagonal(together_FF, 0.0)  # with all other neurons
    value_F = (together_FF * (labels_F[:, None] == labels_F)).sum(axis=1)
    order_F = np.argsort(-value_F, kind="stable")
    by_sub_F = order_F[np.argsort(labels_F[order_F], kind="stable")]
    return by_sub_F.reshape(subs, -1)[:, :count]


def choose_judges(
    activations_TF: np.ndarray,
    norms_TU: np.ndarray,
    labels_F: np.ndarray,
    count: int,
    choice: str = "fitted",
) -> Judges:
    """Gate neurons of one expert.

    Args:
      activations_TF: of tokens routed to it, at least one.
      norms_TU: what they stand for, see `linear.sub_norms`.
      count: r, at most the neurons of a sub-expert.
      choice: fitted or central.
    """
    if choice == "fitted":
        return fit_judges(activations_TF, norms_TU, labels_F, count)
    ids_Ur = central_neurons(activations_TF, labels_F, norms_TU.shape[1], count)
    prior_U = np.zeros(len(ids_Ur), np.float32)
    return Judges(ids_Ur, np.ones(ids_Ur.shape, np.float32), prior_U)


def fit_judges(
    activations_TF: np.ndarray, norms_TU: np.ndarray, labels_F: np.ndarray, count: int
) -> Judges:
    """The neurons that predict the norms best, best first, and their factors."""
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
    scale_Ur *= count  # the gate takes a mean
    return Judges(neurons_Ur, scale_Ur.astype(np.float32), prior_U.astype(np.float32))


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


class RankShares:
    """Mean share of a layer's output by (rank of the parent, place of the block).

    Blocks are placed by their levels, as at run time; what they add is router weight x
    true norm. Samples of every expert count by how often it was chosen.
    """

    def __init__(self, top_k: int, subs: int):
        self._sum_PU = np.zeros((top_k, subs))
        self._count_P = np.zeros(top_k)

    def add(self, ranks_T, weights_T, levels_TU, norms_TU, each: float = 1.0) -> None:
        """Adds the tokens of one expert, of which a row stands for `each`.

        Args:
          ranks_T, weights_T: place and weight of the expert in the token's choice.
          levels_TU, norms_TU: from `Judges.levels` and `linear.sub_norms`.
        """
        place_TU = np.argsort(-levels_TU, axis=1, kind="stable")
        placed_TU = np.take_along_axis(norms_TU, place_TU, axis=1)
        np.add.at(self._sum_PU, ranks_T, each * weights_T[:, None] * placed_TU)
        self._count_P += each * np.bincount(ranks_T, minlength=len(self._count_P))

    def table(self) -> tuple[tuple[float, ...], ...]:
        """[k'][U] shares, falling in each row; ranks never seen get zeros."""
        mean_PU = self._sum_PU / np.maximum(self._count_P, 1e-30)[:, None]
        falling_PU = np.minimum.accumulate(mean_PU, axis=1)
        share_PU = falling_PU / max(falling_PU.sum(), 1e-30)
        return tuple(tuple(row) for row in share_PU.tolist())
