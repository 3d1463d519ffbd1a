"""Counts which experts compute which tokens, from an engine's routing."""

import numpy as np

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
