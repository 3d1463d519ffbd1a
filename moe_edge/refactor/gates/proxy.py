"""The proxy gate without training: which neurons judge a sub-expert, and how.

MoE-Prism, section 4.3.1 ("central"). A token's most active neurons (the paper's top
3/4) make a binary matrix B, and B^T B counts how often two neurons are active together.
The centrality of a neuron is its sum over the other neurons of its sub-expert; the r
most central ones are gate neurons, and the mean of their |activation| stands for the
block's.

Ours ("fitted", `fit_gate.py`): the r neurons from which the block's norm is predicted
best, each with a factor, and a prior of the block.
"""

from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.model.record import RecordLayout
from moe_edge.refactor.gates.fit import fit_neurons

ACTIVE_SHARE = 0.75
CHOICES = ("fitted", "central")


class Judges(NamedTuple):
    """Gate neurons of one expert, or stacked `[E, ..]` of a layer.

    A block's level is the mean of scale x |activation| over its r gate neurons, plus
    its prior, and at least 0.
    """

    neurons_Ur: np.ndarray  # int, ids in the parent
    scale_Ur: np.ndarray  # float32
    prior_U: np.ndarray  # float32

    def levels(self, activations_TF: np.ndarray) -> np.ndarray:
        """Levels of every block for one expert's tokens: float32 `[T, U]`."""
        chosen_TUr = np.abs(activations_TF[:, self.neurons_Ur], dtype=np.float32)
        level_TU = (chosen_TUr * self.scale_Ur).mean(axis=2)
        return np.maximum(level_TU + self.prior_U, 0.0)


def stack_judges(experts: list[Judges]) -> Judges:
    """Those of a layer's experts as one, with a leading axis E."""
    return Judges(*(np.stack(parts) for parts in zip(*experts, strict=True)))


def coactivation(activations_TF: np.ndarray, share: float = ACTIVE_SHARE) -> np.ndarray:
    """Tokens in which two neurons are both among the most active: `[F, F]`.

    Args:
      activations_TF: of tokens routed to the expert.
      share: of a token's neurons that count as active.
    """
    F = activations_TF.shape[1]
    active = max(1, round(share * F))
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
      norms_TU: what they stand for, see `importance.sub_norms`.
      labels_F: sub-expert of every neuron.
      count: r.
      choice: one of `CHOICES`.
    Raises:
      ConfigError: more gate neurons than a sub-expert has, or an unknown choice.
    """
    check_known("choice of gate neurons", choice, CHOICES)
    subs = norms_TU.shape[1]
    if not 1 <= count <= len(labels_F) // subs:
        raise ConfigError(
            f"gate_neurons must be in 1..{len(labels_F) // subs}, the neurons of a "
            f"sub-expert, got {count}"
        )
    if choice == "fitted":
        return Judges(*fit_neurons(activations_TF, norms_TU, labels_F, count))
    ids_Ur = central_neurons(activations_TF, labels_F, subs, count)
    return Judges(ids_Ur, np.ones(ids_Ur.shape, np.float32), np.zeros(subs, np.float32))


class RankShares:
    """Mean share of a layer's output by (rank of the parent, place of the block).

    Blocks are placed by their levels, as at run time; what they add is router weight x
    true norm. Samples of every expert count by how often it was chosen.
    """

    def __init__(self, top_k: int, subs: int):
        self._sum_PU = np.zeros((top_k, subs))
        self._count_P = np.zeros(top_k)

    def add(self, ranks_T, weights_T, levels_TU, norms_TU, each: float = 1.0) -> None:
        """Adds the tokens of one expert.

        Args:
          ranks_T: place of the expert in the token's choice.
          weights_T: router weight.
          levels_TU: from `Judges.levels`.
          norms_TU: from `importance.sub_norms`.
          each: how many tokens a row stands for.
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


def gate_tensors(
    records_ER: np.ndarray, layout: RecordLayout, judges: Judges
) -> dict[str, np.ndarray]:
    """Dense tensors of the gate neurons of some parents, block by block.

    Args:
      records_ER: the parents' records; rows keep their dtype and bits.
      layout: of the records.
      judges: of these parents, stacked.
    """
    E = len(records_ER)
    ids_EN = judges.neurons_Ur.reshape(E, -1)
    names = {"gate": "proxy_gate", "up": "proxy_up"}
    if layout.has_bias:
        names |= {"gate_bias": "proxy_gate_bias", "up_bias": "proxy_up_bias"}
    tensors = {
        "router.proxy_scale": judges.scale_Ur.reshape(-1).astype(np.float32),
        "router.proxy_prior": judges.prior_U.reshape(-1).astype(np.float32),
    }
    for part_name, name in names.items():
        part = layout.part(records_ER, part_name)
        ids = ids_EN.reshape(*ids_EN.shape, *[1] * (part.ndim - 2))
        taken = np.take_along_axis(part, ids, axis=1)
        tensors[f"router.{name}"] = taken.reshape(-1, *part.shape[2:])
    return tensors
