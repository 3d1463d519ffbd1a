"""Which experts compute which tokens: counts, their entropy, and their distances."""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig


class UsageCounter:
    """An `on_routing` callback that adds up choices.

    Attributes:
      layers: ids of the MoE layers.
      counts_LE: int64, how often each expert was among the chosen; padding is not
        counted.
    """

    def __init__(self, config: ModelConfig):
        self.layers = config.moe_layers
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._num_experts = config.moe.num_experts
        self.counts_LE = np.zeros((len(self.layers), self._num_experts), np.int64)

    def __call__(self, layer: int, routing) -> None:
        ids = np.asarray(routing.ids_TK).ravel()  # padding has id E
        counts_E = np.bincount(ids, minlength=self._num_experts + 1)
        self.counts_LE[self._row[layer]] += counts_E[: self._num_experts]


def usage_entropy(counts_NLE: np.ndarray) -> np.ndarray:
    """Entropy of each task's expert usage by layer, bits: log2(E) when uniform.

    Args:
      counts_NLE: how often each of N tasks chose each expert.
    Returns:
      float64 [N, L].
    Raises:
      ConfigError: a layer without any choice.
    """
    counts_NLE = np.asarray(counts_NLE, np.float64)
    total_NL1 = counts_NLE.sum(axis=-1, keepdims=True)
    if (total_NL1 <= 0).any():
        where = np.argwhere(total_NL1[..., 0] <= 0)[0].tolist()
        raise ConfigError(
            f"expert counts at {where} sum to 0, expected at least one choice in every "
            "layer; count more tokens"
        )
    share_NLE = counts_NLE / total_NL1
    safe_NLE = np.where(share_NLE > 0, share_NLE, 1.0)
    return -(share_NLE * np.log2(safe_NLE)).sum(axis=-1)


def usage_distances(counts_NPLE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Total variation distances of expert usage per layer: (domains, control).

    Both compare a first with a second text of equal size: of two different domains,
    averaged over ordered pairs, and of one domain.

    Args:
      counts_NPLE: choices in P = 2 texts of each of N domains.
    Raises:
      ConfigError: fewer than two domains, or not two texts each.
    """
    N, P = counts_NPLE.shape[:2]
    if N < 2 or P != 2:
        raise ConfigError(f"usage needs two texts of two domains, got {P} of {N}")
    shares = counts_NPLE / np.maximum(counts_NPLE.sum(-1, keepdims=True), 1)
    first_N1LE, second_1NLE = shares[:, None, 0], shares[None, :, 1]
    distance_NNL = 0.5 * np.abs(first_N1LE - second_1NLE).sum(-1)
    same = np.eye(N, dtype=bool)
    return distance_NNL[~same].mean(axis=0), distance_NNL[same].mean(axis=0)
