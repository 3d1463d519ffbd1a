"""Prediction by foreknowledge: the bound of what prefetching can reach."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.core.plug_in import register
from moe_edge.predict.base import NOT_WANTED, Predictor


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Oracle(Predictor):
    """Knows every choice of a run that was recorded before.

    A step is one pass over the layers: it rises when the observed layer does not.
    """

    # int (steps, layers, most experts of a step), what each step will choose, best
    # first and each once; padded with -1 at the end.
    chosen_SLK: np.ndarray
    name: ClassVar[str] = "oracle"
    SOURCE: ClassVar[str] = "foreknowledge: the bound of prefetching"
    needs: ClassVar[frozenset[str]] = frozenset({"future"})
    from_context: ClassVar[dict[str, str]] = {"chosen_SLK": "choices"}

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
        _, L, _ = self.chosen_SLK.shape
        # The layers ahead, over the end of a step too, are the next rows.
        first = state["step"] * L + layer + 1
        ids_XK, scores_XK, width_X = self._rows
        width = max(width_X[first : first + horizon], default=0)
        rows = slice(first, first + horizon)
        if first + horizon > len(ids_XK):
            rows = np.minimum(np.arange(first, first + horizon), len(ids_XK) - 1)
        return ids_XK[rows, :width].copy(), scores_XK[rows, :width].copy()

    def finish_sequence(self, state, fresh):
        return state  # the recorded run goes on

    @functools.cached_property
    def _rows(self):
        """Ids and scores, a row a layer of every step and an empty one at the end;
        and how many each row names."""
        steps, L, K = self.chosen_SLK.shape
        ids_XK = np.full((steps * L + 1, K), -1, np.int32)
        ids_XK[:-1] = self.chosen_SLK.reshape(steps * L, K)
        by_rank_K = 1.0 - np.arange(K, dtype=np.float32) / K
        scores_XK = np.where(ids_XK < 0, np.float32(NOT_WANTED), by_rank_K)
        return ids_XK, scores_XK, (ids_XK >= 0).sum(axis=1).tolist()
