"""MoE-Infinity's prediction: the most similar sequence of the past.

Source: MoE-Infinity, arXiv 2401.14361, activation-aware prefetching: per sequence a
matrix of how many tokens each expert of each layer got; a collection of such
matrices; at layer l the nearest one by the rows up to l tells the rest.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.core.plug_in import register
from moe_edge.predict.base import (
    Predictor,
    best_first,
    count_experts,
    no_prediction,
    target_layers,
    with_row,
)

EPSILON = 1e-8


@register
@dataclasses.dataclass(frozen=True)
class ActivationMatrix(Predictor):
    """Nearest matrix by the mean cosine of rows up to the current layer.

    Scores are `(row + 1e-8) * (1 - ahead / (L + 1))` with rows that sum to one. As
    many experts are named as the latest observed layer chose. A full collection
    replaces its oldest matrix (ours: the description leaves it open).
    """

    capacity: int = 1000  # C, most matrices kept
    name: ClassVar[str] = "moe_infinity"
    SOURCE: ClassVar[str] = "MoE-Infinity, arXiv 2401.14361, prefetching"
    per_sequence: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    whole_prompt: ClassVar[bool] = True

    def __post_init__(self):
        check_count("capacity of the activation-matrix collection", self.capacity)

    def init(self, spec):
        """State.

        `share_LCE` float32: past matrices, each row divided by its sum. `norm_LC`:
        Euclidean norms of their rows. `finished`: sequences so far, kept or not.
        `counts_LE`: the running sequence. `similarity_C`: sum of row cosines up to
        `layer`. `width`: distinct experts chosen last.
        """
        L, E = spec.num_layers, spec.num_experts
        return {
            "share_LCE": np.zeros((L, 0, E), np.float32),
            "norm_LC": np.zeros((L, 0), np.float32),
            "finished": 0,
        } | self._fresh(L, E, 0)

    def _fresh(self, L: int, E: int, C: int):
        return {
            "counts_LE": np.zeros((L, E), np.float32),
            "similarity_C": np.zeros(C, np.float32),
            "layer": -1,
            "width": 0,
        }

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        counts_LE = state["counts_LE"]
        new_E = count_experts(np.asarray(ids_TK), counts_LE.shape[1])
        counts_E = counts_LE[layer] + new_E
        norm_C = state["norm_LC"][layer] * np.linalg.norm(counts_E)
        cosine_C = state["share_LCE"][layer] @ counts_E / np.maximum(norm_C, EPSILON)
        # Rows above `layer` still lack this token, so a new pass starts from zero.
        begins = layer <= state["layer"]
        return state | {
            "counts_LE": with_row(counts_LE, layer, counts_E),
            "similarity_C": cosine_C if begins else state["similarity_C"] + cosine_C,
            "layer": layer,
            "width": int(np.count_nonzero(new_E)),
        }

    def predict(self, state, layer, horizon):
        share_LCE = state["share_LCE"]
        if share_LCE.shape[1] == 0:
            return no_prediction(horizon)
        L = len(share_LCE)
        nearest = int(np.argmax(state["similarity_C"]))
        share_NE = share_LCE[target_layers(layer, horizon, L), nearest]
        nearness_N1 = 1 - (1 + np.arange(horizon, dtype=np.float32)[:, None]) / (L + 1)
        wanted_NE = (share_NE + EPSILON) * nearness_N1
        wanted_NE[~share_NE.any(axis=1)] = -1.0  # dense layers
        return best_first(wanted_NE, state["width"])

    def finish_sequence(self, state, fresh):
        """Adds the sequence's matrix to the collection."""
        counts_LE = state["counts_LE"]
        if not counts_LE.any():
            return fresh
        share_LCE, norm_LC = fresh["share_LCE"], fresh["norm_LC"]
        finished, (L, C, E) = fresh["finished"], share_LCE.shape
        more = int(C < self.capacity)
        share_LCE = np.pad(share_LCE, ((0, 0), (0, more), (0, 0)))
        norm_LC = np.pad(norm_LC, ((0, 0), (0, more)))
        total_L1 = np.maximum(counts_LE.sum(axis=1, keepdims=True), EPSILON)
        share_LE, place = counts_LE / total_L1, finished % self.capacity
        share_LCE[:, place] = share_LE
        norm_LC[:, place] = np.linalg.norm(share_LE, axis=1)
        kept = {"share_LCE": share_LCE, "norm_LC": norm_LC, "finished": finished + 1}
        return kept | self._fresh(L, E, C + more)
