"""What a placement is judged by: Prism's proxy, eq. 2."""

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape


def objective(frequency_NLE: np.ndarray, on_NLE: np.ndarray) -> float:
    """Frequency of the calls that leave their server: sum of f[n, l, e] if e not on n.

    Args:
      frequency_NLE: [N, L, E], how often server N calls block E of layer L.
      on_NLE: bool [N, L, E], the server holds the block.
    Source: Prism, eq. 2.
    """
    return float(np.where(on_NLE, 0.0, frequency_NLE).sum())


def check_frequency(frequency_NLE: np.ndarray) -> np.ndarray:
    """float64 [N, L, E] of finite frequencies with calls in every layer.

    Raises:
      ConfigError: another rank, NaN, infinite or negative values, a layer that a
        server never calls.
    """
    frequency_NLE = np.asarray(frequency_NLE, np.float64)
    check_shape("frequency_NLE", frequency_NLE, (None, None, None))
    bad = ~(np.isfinite(frequency_NLE) & (frequency_NLE >= 0))
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        value = frequency_NLE[tuple(place)]
        raise ConfigError(
            f"frequency of (server, layer, block) {place} is {value}, expected a "
            "finite number from 0"
        )
    silent = np.argwhere(frequency_NLE.sum(axis=-1) <= 0)
    if len(silent) or not frequency_NLE.size:
        place = silent[0].tolist() if len(silent) else list(frequency_NLE.shape)
        raise ConfigError(
            f"frequencies of (server, layer) {place} sum to 0, expected calls of every "
            "layer; count more tokens"
        )
    return frequency_NLE
