"""What a partition of an expert's neurons is worth: the norms that are left out.

More letters than in core/types.py: labels_F says which of the U sub-experts a neuron
belongs to, every sub-expert having F / U neurons; R partitions stand side by side.
"""

from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape


def grouped_sums(A_TF: np.ndarray, labels_RF: np.ndarray, subs: int) -> np.ndarray:
    """Sums of every sub-expert's columns: of magnitudes, its L1 norms.

    Args:
      labels_RF: int [R, F], or [F] for one partition.
    Returns:
      [U, R, T], or [U, T] for one partition, by one product for all.
    """
    member = labels_RF == np.arange(subs).reshape(-1, *[1] * labels_RF.ndim)
    return member.astype(A_TF.dtype) @ A_TF.T


def magnitudes(M_TF) -> np.ndarray:
    """|M| in float64 if M is, else in float32 (float16 sums would overflow)."""
    M_TF = np.asarray(M_TF)
    return np.abs(M_TF, dtype=magnitude_dtype(M_TF.dtype))


def magnitude_dtype(dtype) -> type:
    """What `magnitudes` of such activations are in."""
    return np.float64 if dtype == np.float64 else np.float32


def smallest(norms_URT: np.ndarray, inactive: int) -> np.ndarray:
    """bool, like `norms_URT`: the `inactive` smallest along U, ties by index.

    Counts for each sub-expert how many come before it: a few comparisons of whole
    planes, where a sort along U would handle every token for itself.
    """
    # int8 where it can hold the ranks: fewer bytes to pass over.
    dtype = np.int8 if len(norms_URT) <= 128 else np.int16
    rank_URT = np.zeros(norms_URT.shape, dtype)
    for a in range(len(norms_URT)):
        for b in range(a + 1, len(norms_URT)):
            after = (norms_URT[a] > norms_URT[b]).view(np.int8)
            rank_URT[a] += after
            rank_URT[b] += 1 - after
    return rank_URT < inactive


def objective(M_TF, labels, subs: int, inactive: int) -> float:
    """Sum over tokens of the `inactive` smallest sub-expert L1 norms.

    Args:
      M_TF: activations [T, F].
      labels: int [F].
    Raises:
      ConfigError: see `check_labels`.
    Source: MoE-Prism, eq. 2.
    """
    labels = check_labels(labels, np.shape(M_TF)[1], subs)
    norms_UT = grouped_sums(magnitudes(M_TF), labels, subs)
    return float(np.sort(norms_UT, axis=0)[:inactive].sum(dtype=np.float64))


def usage_of(norms_UT: np.ndarray, low_UT: np.ndarray) -> np.ndarray:
    """Share of tokens for which each sub-expert stays active, float64 [U].

    Balanced use is (U - inactive) / U everywhere; 1 and 0 mean static pruning. Tokens
    without any activation are left out.
    """
    heard_T = norms_UT.sum(0) > 0
    return (~low_UT & heard_T).sum(1) / max(int(heard_T.sum()), 1)


def check_labels(labels, neurons: int, subs: int) -> np.ndarray:
    """`labels` as an array, if it is a partition into equal sub-experts.

    Raises:
      ConfigError: another length, or sub-experts of unequal size.
    """
    labels = np.asarray(labels)
    check_shape("labels", labels, (neurons,))
    if labels.dtype.kind not in "iu":
        raise ConfigError(f"labels are {labels.dtype}, expected whole numbers")
    inside = labels.size and labels.min() >= 0 and labels.max() < subs
    sizes = np.bincount(labels, minlength=subs) if inside else np.array([-1])
    if not (sizes == neurons // subs).all():
        raise ConfigError(
            f"labels are no partition of {neurons} neurons into {subs} sub-experts of "
            f"{neurons // subs}"
        )
    return labels


def order_by_mass(mass_F, labels, subs: int) -> np.ndarray:
    """The same partition, sub-experts numbered by total L1 norm, the largest first.

    With a gate that cannot tell sub-experts apart the first ones are run, so this order
    leaves out the least.

    Args:
      mass_F: total magnitude of each neuron, weighted as the caller likes.
    """
    labels = check_labels(labels, len(mass_F), subs)
    mass_U = np.bincount(labels, weights=mass_F, minlength=subs)
    return renumbered(labels, mass_U).astype(np.int64)


def renumbered(labels: np.ndarray, value_U: np.ndarray) -> np.ndarray:
    """The same partition, sub-experts numbered by falling value."""
    rank_U = np.argsort(np.argsort(-value_U, kind="stable"))
    return rank_U.astype(labels.dtype)[labels]


def qualities(
    M_TF, partitions: dict[str, np.ndarray], subs: int, inactive: int
) -> dict[str, dict[str, Any]]:
    """Objective, its share of all |M|, and how the sub-experts are used.

    Args:
      partitions: name -> labels [F]; the norms of all come from one product.
    Returns:
      name -> objective, total (sum of |M|), share (0..1), usage (see `usage_of`) and
      usage_spread, its standard deviation: 0 is balanced use.
    """
    M_TF = magnitudes(M_TF)
    labels_RF = np.stack(
        [check_labels(labels, M_TF.shape[1], subs) for labels in partitions.values()]
    )
    norms_URT = grouped_sums(M_TF, labels_RF, subs)
    low_URT = smallest(norms_URT, inactive)
    total = float(norms_URT[:, 0].sum(dtype=np.float64))
    result = {}
    for r, name in enumerate(partitions):
        norms_UT, low_UT = norms_URT[:, r], low_URT[:, r]
        cost = float(norms_UT.sum(where=low_UT, dtype=np.float64))
        used_U = usage_of(norms_UT, low_UT)
        result[name] = {
            "objective": cost,
            "total": total,
            "share": cost / total if total > 0 else 0.0,
            "usage": [round(float(share), 6) for share in used_U],
            "usage_spread": float(used_U.std()),
        }
    return result
