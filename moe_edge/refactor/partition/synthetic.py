"""Activations with a planted structure, for tests and benchmarks."""

import numpy as np


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
    """Gaussian activations; each token drives the neurons of `active` clusters.

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
