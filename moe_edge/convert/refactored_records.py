"""Experts into sub-experts: records cut along the neurons, and how they are scaled.

MoE-Prism, section 4.2: a neuron is row j of gate and up and column j of down; an
expert is the sum of its neurons, so any partition of them sums to the parent.

Scale. With a gate that keeps the router a sub-expert runs with its parent's weight:
records are cut, nothing else, but the down bias b is in every one of U blocks, hence
b / U. With a linear gate each parent's router row stands U times. Where a weight is
normalised over the rows (softmax over all rows or over the chosen, or a sum to one)
every copy gets w / U, so down is multiplied by U, and its bias stays: U blocks x w / U
x b. A sigmoid that is not normalised gives every copy w, so the factor is 1, and the
bias b / U again.
In short: down x factor, down bias x factor / U.

A factor that is a power of two changes exponents only and is exact in every dtype; any
other rounds each down weight once, to nearest, in the checkpoint's dtype. In 2 bytes
that is seen: with U = 3 in bfloat16 all blocks together are the parent but for 1e-2.
"""

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError, check_shape
from moe_edge.model.config import MoeConfig
from moe_edge.model.record import RecordLayout


def down_factor(moe: MoeConfig, subs: int, gate: str) -> int:
    """What down matrices are multiplied by so that all blocks sum to the parent.

    Args:
      moe: of the parent.
      gate: of the child, one of `model.config_checks.GATES`.
    """
    if gate != "linear":
        return 1
    return 1 if moe.scoring == "sigmoid" and not moe.norm_topk else subs


def is_exact(factor: int, subs: int, has_bias: bool) -> bool:
    """Whether scaling cannot round (overflow is refused).

    Args:
      factor: see `down_factor`; down biases are multiplied by `factor` / `subs`.
    """
    return subs & (subs - 1) == 0 or (factor == 1 and not has_bias)


def sub_layout(parent: RecordLayout, subs: int) -> RecordLayout:
    """Layout of a sub-expert's record."""
    return RecordLayout(parent.d_model, parent.expert_dim // subs, parent.has_bias)


def neurons_of(labels_EF: np.ndarray, subs: int) -> np.ndarray:
    """Neuron ids by sub-expert, ascending in each: int `[E, U, F / U]`.

    Raises:
      ConfigError: labels that are not `subs` sets of equal size.
    """
    E, F = labels_EF.shape
    counts = np.stack([np.bincount(row, minlength=subs) for row in labels_EF])
    if counts.shape != (E, subs) or (counts != F // subs).any():
        raise ConfigError(
            f"labels must put {F // subs} of {F} neurons into each of {subs} "
            f"sub-experts; got {counts[np.argmax(np.abs(counts - F / subs).max(1))]}"
        )
    return np.argsort(labels_EF, axis=1, kind="stable").reshape(E, subs, -1)


def split_records(
    records_ER: np.ndarray,
    labels_EF: np.ndarray,
    layout: RecordLayout,
    subs: int,
    factor: int,
) -> np.ndarray:
    """Cuts expert records into sub-expert records.

    Args:
      records_ER: of the parents, in any weight dtype.
      labels_EF: sub-expert of every neuron, 0 the most important.
      layout: of `records_ER`.
      subs: U.
      factor: see `down_factor`.
    Returns:
      `[E * U, R']` in the same dtype, blocks of a parent one behind another.
    Raises:
      CheckpointError: values that overflow the dtype once scaled.
    """
    E = len(records_ER)
    check_shape("records", records_ER, (None, layout.size))
    check_shape("labels", labels_EF, (E, layout.expert_dim))
    child = sub_layout(layout, subs)
    order_EF = neurons_of(labels_EF, subs).reshape(E, -1)
    rows_EF1, columns_E1F = order_EF[:, :, None], order_EF[:, None, :]
    D, f = layout.d_model, child.expert_dim
    out = np.zeros((E, subs, child.size), records_ER.dtype)

    def neurons(name):
        part = layout.part(records_ER, name)
        if part.ndim == 3:
            return np.take_along_axis(part, rows_EF1, axis=1)
        return np.take_along_axis(part, order_EF, axis=1)

    for name in ("gate", "up"):
        child.part(out, name)[...] = neurons(name).reshape(E, subs, f, D)
    down_EDF = np.take_along_axis(layout.part(records_ER, "down"), columns_E1F, axis=2)
    down_EUDf = down_EDF.reshape(E, D, subs, f).swapaxes(1, 2)
    child.part(out, "down")[...] = _scaled(down_EUDf, factor)
    if layout.has_bias:
        for name in ("gate_bias", "up_bias"):
            child.part(out, name)[...] = neurons(name).reshape(E, subs, f)
        bias_ED = layout.part(records_ER, "down_bias")
        child.part(out, "down_bias")[...] = _scaled(bias_ED, factor / subs)[:, None]
    return out.reshape(E * subs, child.size)


def _scaled(array: np.ndarray, factor: float) -> np.ndarray:
    """`array` x factor, rounded once to its own dtype."""
    if factor == 1:
        return array
    with np.errstate(over="ignore"):
        scaled = (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)
    if not np.isfinite(scaled.astype(np.float32)).all():
        raise CheckpointError(
            f"down weights times {factor:g} overflow {array.dtype.name}; convert the "
            "checkpoint with --dtype bfloat16 or float32 first"
        )
    return scaled
