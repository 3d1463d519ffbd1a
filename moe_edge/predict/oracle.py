"""Prediction by foreknowledge: the bound of what prefetching can reach."""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.predict.base import NOT_WANTED, Predictor, no_prediction


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle(Predictor):
    """Knows every choice of a run that was recorded before.

    A step is one pass over the layers: it rises when the observed layer does not.

    Attributes:
      chosen_SLK: int (steps, layers, most experts of a step), what each step will
        choose, best first and each once; padded with -1 at the end.
    """

    chosen_SLK: np.ndarray
    name: ClassVar[str] = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"future"})

    def __post_init__(self):
        check_shape("chosen_SLK", self.chosen_SLK, (None, None, None))

    def init(self, spec):
        """State: `step` and `layer`, where the run is."""
        _, L, _ = self.chosen_SLK.shape
        highest = int(self.chosen_SLK.max(initial=-1))
        if L != spec.num_layers or highest >= spec.num_experts:
            raise ConfigError(
                f"the oracle's trace has {L} layers and experts up to {highest}, the "
                f"model {spec.num_layers} layers and {spec.num_experts} experts: was "
                "it recorded with this model?"
            )
        return {"step": 0, "layer": -1}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        wrapped = layer <= state["layer"]
        return state | {"step": state["step"] + wrapped, "layer": layer}

    def predict(self, state, layer, horizon):
        steps, L, _ = self.chosen_SLK.shape
        wraps_N, layer_N = np.divmod(layer + 1 + np.arange(horizon), L)
        step_N = state["step"] + wraps_N
        known_N = step_N < steps
        if not known_N.any():
            return no_prediction(horizon)
        ids_NK = self.chosen_SLK[np.minimum(step_N, steps - 1), layer_N]
        ids_NK = np.where(known_N[:, None], ids_NK, -1)
        width = int((ids_NK >= 0).sum(axis=1).max())
        ids_NM = ids_NK[:, :width].astype(np.int32)
        by_rank_M = 1.0 - np.arange(width, dtype=np.float32) / ids_NK.shape[1]
        return ids_NM, np.where(ids_NM < 0, np.float32(NOT_WANTED), by_rank_M)
