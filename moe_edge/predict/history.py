"""Predictions from what the sequence chose so far."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import register
from moe_edge.predict.base import (
    NOT_WANTED,
    Predictor,
    best_first,
    count_experts,
    rank_scores,
    target_layers,
    with_row,
)


@register
@dataclasses.dataclass(frozen=True)
class PreviousToken(Predictor):
    """The experts that the previous token chose at that layer."""

    name: ClassVar[str] = "previous"
    SOURCE: ClassVar[str] = "baseline: experts repeat from token to token"
    per_sequence: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"ids"})

    def init(self, spec):
        """State: `last_LE` float32, scores of each layer's latest choice."""
        shape = (spec.num_layers, spec.num_experts)
        return {"last_LE": np.full(shape, NOT_WANTED, np.float32)}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        last_LE = state["last_LE"]
        wanted_E = rank_scores(np.asarray(ids_TK), last_LE.shape[1])
        return {"last_LE": with_row(last_LE, layer, wanted_E)}

    def predict(self, state, layer, horizon):
        last_LE = state["last_LE"]
        return best_first(last_LE[target_layers(layer, horizon, len(last_LE))])


@register
@dataclasses.dataclass(frozen=True)
class Frequency(Predictor):
    """The experts that the sequence chose most often at that layer.

    As many as the latest observed layer chose; scores are shares of the choices.
    """

    decay: float = 1.0  # of a layer's counts at each of its observations; 1 keeps all
    name: ClassVar[str] = "frequency"
    SOURCE: ClassVar[str] = "baseline: counts of the sequence"
    per_sequence: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    whole_prompt: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must lie in (0, 1], got {self.decay}")

    def init(self, spec):
        """State: `counts_LE` float32 and `width`, distinct experts chosen last."""
        shape = (spec.num_layers, spec.num_experts)
        return {"counts_LE": np.zeros(shape, np.float32), "width": 0}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        counts_LE = state["counts_LE"]
        new_E = count_experts(np.asarray(ids_TK), counts_LE.shape[1])
        counts_E = self.decay * counts_LE[layer] + new_E
        return {
            "counts_LE": with_row(counts_LE, layer, counts_E),
            "width": int(np.count_nonzero(new_E)),
        }

    def predict(self, state, layer, horizon):
        counts_LE = state["counts_LE"]
        counts_NE = counts_LE[target_layers(layer, horizon, len(counts_LE))]
        total_N1 = np.maximum(counts_NE.sum(axis=1, keepdims=True), 1e-30)
        wanted_NE = np.where(counts_NE > 0, counts_NE / total_N1, NOT_WANTED)
        return best_first(wanted_NE, state["width"])
