"""How unevenly neurons share the work of an expert, from a profile's activations."""

import dataclasses

import numpy as np

TOP = 0.25  # of the neurons
COVERED = 0.9  # of the L1 norm
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.99)
MAGNITUDES = np.logspace(-3, 2, 101)  # |activation| / mean of the expert
NOISE_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """One expert; F neurons.

    Attributes:
      mean: of |activation|.
      quantiles_Q: of |activation|, at QUANTILES.
      share_below_M: share of activations below MAGNITUDES x mean.
      dynamic_F: [F + 1] share of a token's L1 norm in its own first neurons, largest
        first; mean over tokens.
      static_F: likewise, one order for all tokens: by total on the first half of the
        rows (fitted), measured on the second half.
      shuffled_F: like dynamic_F with every neuron's values (as shares of their rows)
        dealt to other tokens: what its neurons would show if they fired independently.
      needed: share of neurons that a token needs for COVERED of its L1 norm.
      dynamic_down_F: like dynamic_F, of |activation| x norm of the neuron's column of
        the down matrix: how far it can move the output.
    """

    mean: float
    quantiles_Q: np.ndarray
    share_below_M: np.ndarray
    dynamic_F: np.ndarray
    static_F: np.ndarray
    shuffled_F: np.ndarray
    needed: float
    dynamic_down_F: np.ndarray


def measure(rows_TF: np.ndarray, down_norm_F: np.ndarray) -> Sparsity:
    """Measures one expert.

    Args:
      rows_TF: activations in random order, at least 2 rows.
      down_norm_F: L2 norm of each neuron's column of the down matrix.
    """
    size_TF = np.abs(np.asarray(rows_TF, np.float32))
    size_TF = size_TF[size_TF.any(axis=1)]
    mean = float(size_TF.mean())
    ascending = np.sort(size_TF, axis=None)
    below_M = np.searchsorted(ascending, MAGNITUDES * mean) / ascending.size
    dynamic_TF = own_order(size_TF)
    share_TF = size_TF / size_TF.sum(axis=1, keepdims=True)
    shuffled_TF = np.random.default_rng(0).permuted(share_TF, axis=0)
    half = len(size_TF) // 2
    order_F = np.argsort(-size_TF[:half].sum(axis=0), kind="stable")
    return Sparsity(
        mean=mean,
        quantiles_Q=np.quantile(ascending, QUANTILES),
        share_below_M=below_M,
        dynamic_F=dynamic_TF.mean(axis=0),
        static_F=share_curves(size_TF[half:, order_F]).mean(axis=0),
        shuffled_F=own_order(shuffled_TF).mean(axis=0),
        needed=float((dynamic_TF < COVERED).sum(axis=1).mean() / size_TF.shape[1]),
        dynamic_down_F=own_order(size_TF * down_norm_F).mean(axis=0),
    )


def own_order(size_TF: np.ndarray) -> np.ndarray:
    """`share_curves` of rows in falling order."""
    return share_curves(-np.sort(-size_TF, axis=1))


def share_curves(size_TF: np.ndarray) -> np.ndarray:
    """[T, F + 1]: share of each row's sum in its first 0, 1, ..., F values.

    Rows of zeros, which have no shares, are left out.
    """
    size_TF = size_TF[size_TF.any(axis=1)]
    total_TF = np.cumsum(size_TF, axis=1, dtype=np.float64)
    curves = np.zeros((len(size_TF), size_TF.shape[1] + 1))
    np.divide(total_TF, total_TF[:, -1:], out=curves[:, 1:])
    return curves


def at_top(curve_F: np.ndarray, top: float = TOP) -> float:
    """A curve's value at the first `top` of the neurons, between them linearly."""
    return float(np.interp(top, np.linspace(0, 1, len(curve_F)), curve_F))


def gated_noise(neurons: int) -> np.ndarray:
    """silu(g) * u of independent standard normal g and u, `[NOISE_ROWS, F]`.

    What a gated expert shows that learned nothing: most products are small already.
    """
    gate, up = np.random.default_rng(0).standard_normal((2, NOISE_ROWS, neurons))
    return gate / (1 + np.exp(-gate)) * up
