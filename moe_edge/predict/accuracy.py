"""How good predictions were: recall and precision by layer and look-ahead."""

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.predict.base import target_layers


class PredictionLog:
    """Compares predictions with what was chosen; cheap enough to be always on.

    A prediction of nothing counts as well: what it missed lowers the recall. Layers
    are only counted once they were predicted, so the first token's may be missing.

    Attributes (int64, layers x look-ahead; index 0 is one layer ahead):
      hits_LA: experts predicted and chosen.
      predicted_LA: experts predicted.
      chosen_LA: experts chosen.
      rounds_LA: comparisons.
    """

    def __init__(self, num_layers: int, num_experts: int, look_ahead: int = 1):
        check_count("look_ahead", look_ahead)
        shape = (num_layers, look_ahead)
        self.hits_LA, self.predicted_LA, self.chosen_LA, self.rounds_LA = (
            np.zeros(shape, np.int64) for _ in range(4)
        )
        # Waiting for the layer to choose; the last column takes padding.
        self._wanted_LAE = np.zeros((*shape, num_experts + 1), bool)
        self._is_waiting_LA = np.zeros(shape, bool)

    def expect(self, layer: int, ids_NM: np.ndarray) -> None:
        """Takes a prediction made after `layer`, as `Predictor.predict` returns it.

        Rows beyond the log's look-ahead are ignored. A prediction that is still
        waiting for the same layer and look-ahead is replaced.
        """
        num_layers, look_ahead = self.rounds_LA.shape
        ids_NM = ids_NM[:look_ahead]
        ahead_N = np.arange(len(ids_NM))
        target_N = target_layers(layer, len(ids_NM), num_layers)
        self._wanted_LAE[target_N, ahead_N] = False
        # Id -1 is the last column.
        self._wanted_LAE[target_N[:, None], ahead_N[:, None], ids_NM] = True
        self._is_waiting_LA[target_N, ahead_N] = True

    def chosen(self, layer: int, ids_TK: np.ndarray) -> None:
        """Compares what waits for `layer` with the ids it chose (E is padding)."""
        waiting_A = self._is_waiting_LA[layer]
        chosen_E = np.zeros(self._wanted_LAE.shape[-1], bool)
        chosen_E[ids_TK] = True
        chosen_E = chosen_E[:-1]
        wanted_AE = self._wanted_LAE[layer, :, :-1] & waiting_A[:, None]
        self.hits_LA[layer] += (wanted_AE & chosen_E[None]).sum(axis=1)
        self.predicted_LA[layer] += wanted_AE.sum(axis=1)
        self.chosen_LA[layer] += waiting_A * chosen_E.sum()
        self.rounds_LA[layer] += waiting_A
        waiting_A[:] = False

    def forget_waiting(self) -> None:
        """Predictions not yet compared are dropped: their sequence has ended."""
        self._is_waiting_LA[:] = False

    @property
    def recall_LA(self) -> np.ndarray:
        """Share of the chosen experts that were predicted; NaN where none was."""
        return ratio(self.hits_LA, self.chosen_LA)

    @property
    def precision_LA(self) -> np.ndarray:
        """Share of the predicted experts that were chosen; NaN where none was."""
        return ratio(self.hits_LA, self.predicted_LA)

    def summary(self) -> dict:
        """JSON-ready: totals by look-ahead and by layer, None instead of NaN."""
        totals = [
            array.sum(axis=0)
            for array in (
                self.hits_LA,
                self.predicted_LA,
                self.chosen_LA,
                self.rounds_LA,
            )
        ]
        hits_A, predicted_A, chosen_A, rounds_A = totals
        return {
            "recall": _plain(ratio(hits_A, chosen_A)),
            "precision": _plain(ratio(hits_A, predicted_A)),
            "rounds": rounds_A.tolist(),
            "recall_by_layer": _plain(self.recall_LA),
            "precision_by_layer": _plain(self.precision_LA),
        }


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where whole is zero."""
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def _plain(array: np.ndarray) -> list:
    """Nested lists with None in place of NaN."""
    return np.where(np.isnan(array), None, array.round(6).astype(object)).tolist()
