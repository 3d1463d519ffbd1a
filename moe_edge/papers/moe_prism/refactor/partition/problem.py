"""A partition problem: checked input, and what of it the solvers minimise."""

import dataclasses

import numpy as np

from moe_edge.core.checks import ConfigError, check_divides, check_shape
from moe_edge.papers.moe_prism.refactor.partition.objective import (
    grouped_sums,
    magnitude_dtype,
    order_by_mass,
)

HELDOUT_RATIO = 0.2  # of the rows, unless told otherwise


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a solver is given.

    Attributes:
      A_TF: float32, not negative: magnitudes as weighted, scaled to at most 1.
      mass_F: float64, total magnitude of each neuron, weighted but never normalised.
      subs: U, divides F.
      inactive: K of the objective, 1..U-1.
      unit: what 1 in `A_TF` stands for, so that unit x cost is the weighted objective.
    """

    A_TF: np.ndarray
    mass_F: np.ndarray
    subs: int
    inactive: int
    unit: float = 1.0

    def cost(self, labels) -> float:
        """The objective that is minimised, of one partition."""
        norms_UT = np.sort(grouped_sums(self.A_TF, labels, self.subs), axis=0)
        return self.unit * float(norms_UT[: self.inactive].sum(dtype=np.float64))

    def ordered(self, labels) -> np.ndarray:
        """The same partition, the most important sub-expert 0: see `order_by_mass`."""
        return order_by_mass(self.mass_F, labels, self.subs)

    @property
    def neurons(self) -> int:
        return self.A_TF.shape[1]


def check_split(neurons: int, subs: int, inactive: int) -> None:
    """Checks the sizes of a partition.

    Raises:
      ConfigError: `neurons` cannot be cut into `subs` equal parts, or `inactive` is
        outside 1..subs-1.
    """
    if type(subs) is not int or subs < 2:
        raise ConfigError(f"sub_experts must be a whole number from 2, got {subs!r}")
    check_divides("sub-experts", subs, "neurons", neurons)
    if type(inactive) is not int or not 1 <= inactive < subs:
        raise ConfigError(
            f"inactive is {inactive!r}, expected 1..{subs - 1}: of {subs} sub-experts "
            "at least one is left out and one is run"
        )


def check_matrix(M_TF) -> np.ndarray:
    """Returns activations [T, F] if they are finite real numbers.

    Raises:
      ConfigError: another rank, empty, not real numbers, all zero, NaN, infinite, or
        so large that sums overflow.
    """
    M_TF = np.asarray(M_TF)
    if fault := _fault_of(M_TF):
        raise ConfigError(f"activations {fault}")
    return M_TF


def _fault_of(M_TF: np.ndarray) -> str | None:
    if M_TF.ndim != 2:
        return f"have shape {M_TF.shape}, expected two axes: tokens, neurons"
    size = f"{M_TF.shape[0]} tokens, {M_TF.shape[1]} neurons"
    if not M_TF.size:
        return f"are empty: {size}"
    if M_TF.dtype.kind not in "fiub":
        return f"are {M_TF.dtype}, expected real numbers (float16 to float64)"
    if not M_TF.any():
        return (
            f"are all zero ({size}), so every partition is as good; profile on other "
            "text"
        )
    # One sum finds every NaN and infinity unless it overflows by itself.
    with np.errstate(over="ignore", invalid="ignore"):
        total = M_TF.sum(dtype=np.float64)
    if not np.isfinite(total) and (bad := int((~np.isfinite(M_TF)).sum())):
        return (
            f"hold {bad} of {M_TF.size} values that are NaN or infinite; profile again "
            "in float32"
        )
    # Norms and their sums are in the input's own precision, from float32.
    limit = float(np.finfo(magnitude_dtype(M_TF.dtype)).max) / M_TF.size
    peak = max(float(M_TF.max()), -float(M_TF.min()))
    if peak > limit:
        return (
            f"reach {peak:.3g}; sums over {M_TF.size} of them need values up to "
            f"{limit:.3g}; scale them down, which changes no partition"
        )
    return None


def build_problem(
    M_TF,
    subs: int,
    inactive: int,
    *,
    normalise: bool = False,
    neuron_weights_F=None,
    token_weights_T=None,
) -> Problem:
    """Checks activations and applies the options of the objective.

    Args:
      M_TF: activations [T, F].
      normalise: divide every neuron by its mean magnitude first, so that a few loud
        neurons do not decide alone; neurons that are always zero stay zero.
      neuron_weights_F: factor of each neuron, such as the norm of its down column.
      token_weights_T: factor of each token, such as the weight its router gave.
    Raises:
      ConfigError: bad input.
    """
    M_TF = check_matrix(M_TF)
    check_split(M_TF.shape[1], subs, inactive)
    A_TF = np.abs(M_TF, dtype=np.promote_types(M_TF.dtype, np.float32))
    mean_F = A_TF.mean(0)
    if token_weights_T is not None:
        weights_T = _check_weights("token_weights_T", token_weights_T, len(M_TF))
        A_TF *= weights_T.astype(A_TF.dtype)[:, None]
    weights_F = np.ones(M_TF.shape[1])
    if neuron_weights_F is not None:
        weights_F = _check_weights("neuron_weights_F", neuron_weights_F, len(weights_F))
    mass_F = weights_F * A_TF.sum(0, dtype=np.float64)
    if normalise:
        weights_F = weights_F / np.where(mean_F > 0, mean_F, 1)
    A_TF *= weights_F.astype(A_TF.dtype)
    # Scaled, so that sums of any input fit float32; solutions do not change.
    peak = float(A_TF.max())
    unit = peak if peak > 0 else 1.0
    A_TF /= A_TF.dtype.type(unit)
    A_TF = A_TF.astype(np.float32, copy=False)
    return Problem(A_TF, mass_F, int(subs), int(inactive), unit)


def _check_weights(name: str, weights, size: int) -> np.ndarray:
    weights = np.asarray(weights)
    check_shape(name, weights, (size,))
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ConfigError(f"{name} must be finite and not negative")
    return weights


def split_rows(
    tokens: int, heldout_ratio: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit on and rows to hold out, ascending; at least one is fitted.

    Raises:
      ConfigError: a ratio outside 0..1.
    """
    if not 0 <= heldout_ratio < 1:
        raise ConfigError(f"heldout_ratio is {heldout_ratio}, expected 0 to below 1")
    order = np.random.default_rng(seed).permutation(tokens)
    count = min(int(tokens * heldout_ratio), tokens - 1)
    return np.sort(order[count:]), np.sort(order[:count])


def planted_activations(
    tokens: int,
    neurons: int,
    *,
    clusters: int = 8,
    active: int = 2,
    background: float = 0.2,
    sigma: float = 0.7,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian activations with a planted structure, for tests and benchmarks.

    Each token drives the neurons of `active` clusters.

    Args:
      tokens, neurons: T and F.
      clusters: of neurons, of equal size up to one.
      active: clusters a token drives; the others respond at `background` times it.
      sigma: spread of the log-normal scale that each neuron has of its own; 0: equal.
      seed: of everything.
    Returns:
      float32 [T, F], and the cluster of each neuron, int64 [F].
    """
    rng = np.random.default_rng(seed)
    cluster_F = rng.permutation(neurons) % clusters
    driven_TC = rng.random((tokens, clusters)).argsort(1) < active
    gain_TC = np.where(driven_TC, np.float32(1), np.float32(background))
    scale_F = np.exp(sigma * rng.standard_normal(neurons)).astype(np.float32)
    M_TF = rng.standard_normal((tokens, neurons), dtype=np.float32)
    M_TF *= gain_TC[:, cluster_F]
    M_TF *= scale_F
    return M_TF, cluster_F
