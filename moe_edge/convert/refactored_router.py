"""What the router of a refactored model has besides its parent's, as dense tensors.

A linear gate repeats the parent's rows; a proxy gate has gate neurons of every block, a
calibrated one a row that says the block's level (`model/router.py` runs all three).
"""

from typing import NamedTuple

import numpy as np

from moe_edge.model.record import RecordLayout

# Dense tensors that have one row or entry an expert.
ROUTER_TENSORS = ("router.weight", "router.bias", "router.correction_bias")
ROUTER_TENSORS += ("router.expert_scale",)


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


class LevelRows(NamedTuple):
    """Rows of one expert's U sub-experts, or stacked `[E, ..]` of a layer.

    A block's level is exp(row . hidden + bias).
    """

    weight_UD: np.ndarray  # float32
    bias_U: np.ndarray  # float32

    def levels(self, hidden_TD: np.ndarray) -> np.ndarray:
        """Predicted norms of every block: float32 `[T, U]`."""
        return np.exp(hidden_TD @ self.weight_UD.T + self.bias_U)


def repeat_router(
    dense: dict[str, np.ndarray], subs: int, scoring: str
) -> dict[str, np.ndarray]:
    """A layer's dense tensors with each parent's router row repeated.

    A softmax over U times as many rows gives each a U-th of its score, so a bias that
    is added to the scores for the choice is divided by U; a sigmoid does not.

    Args:
      dense: canonical name -> array of a MoE layer.
      subs: U.
      scoring: of the router, see `model/config_checks.py`.
    """
    found = {
        name: np.repeat(array, subs, axis=0) if name in ROUTER_TENSORS else array
        for name, array in dense.items()
    }
    bias = "router.correction_bias"
    if bias in found and scoring == "softmax":
        found[bias] = (found[bias] / np.float32(subs)).astype(found[bias].dtype)
    return found


def gate_tensors(
    records_ER: np.ndarray, layout: RecordLayout, judges: Judges
) -> dict[str, np.ndarray]:
    """Dense tensors of the gate neurons of some parents, block by block.

    Args:
      records_ER: the parents' records; rows keep their dtype and bits.
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


def level_tensors(rows: list[LevelRows], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Dense tensors of a layer's experts, block by block.

    Args:
      dtype: rows are stored in, that of the model.
    """
    weight_BD = np.concatenate([one.weight_UD for one in rows])
    return {
        "router.level_weight": weight_BD.astype(dtype),
        "router.level_bias": np.concatenate([one.bias_U for one in rows]),
    }
