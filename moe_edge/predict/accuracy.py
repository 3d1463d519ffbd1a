"""How good predictions were: recall and precision by layer and look-ahead."""

import numpy as np

from moe_edge.core.checks import check_count
from moe_edge.core.files import plain_numbers


class PredictionLog:
    """Compares predictions with what was chosen; cheap enough to be always on.

    A prediction of nothing counts as well: what it missed lowers the recall. Layers
    are only counted once they were predicted, so the first token's may be missing.

    Attributes (int64, layers x look-ahead; index 0 is one layer ahead), made when they
    are read, for counting in arrays takes ten times as long as in lists:
      hits_LA: experts predicted and chosen.
      predicted_LA: experts predicted.
      chosen_LA: experts chosen.
      rounds_LA: comparisons.
    """

    def __init__(self, num_layers: int, num_experts: int, look_ahead: int = 1):
        check_count("look_ahead", look_ahead)
        self._num_experts, self._shape = num_experts, (num_layers, look_ahead)
        # [hits, predicted, chosen, rounds] of every layer and look-ahead.
        self._counts = [[4 * [0] for _ in range(look_ahead)] for _ in range(num_layers)]
        # Waiting for the layer to choose. Sets: for a few ids they are several times
        # faster than arrays, and this runs at every lookup.
        self._wanted_LA: list[list[set[int] | None]]
        self.forget_waiting()

    def expect(self, layer: int, ids_NM: np.ndarray) -> None:
        """Takes a prediction made after `layer`, as `Predictor.predict` returns it.

        Rows beyond the log's look-ahead are ignored. A prediction that is still
        waiting for the same layer and look-ahead is replaced.
        """
        num_layers, look_ahead = self._shape
        for ahead, ids in enumerate(ids_NM[:look_ahead].tolist()):
            wanted = set(ids)
            wanted.discard(-1)
            self._wanted_LA[(layer + 1 + ahead) % num_layers][ahead] = wanted

    def chosen(self, layer: int, ids_TK: np.ndarray) -> None:
        """Compares what waits for `layer` with the ids it chose (E is padding)."""
        waiting = self._wanted_LA[layer]
        found = None
        for ahead, wanted in enumerate(waiting):
            if wanted is None:
                continue
            if found is None:
                found = set(ids_TK.reshape(-1).tolist())
                found.discard(self._num_experts)
            counts = self._counts[layer][ahead]
            counts[0] += len(wanted & found)
            counts[1] += len(wanted)
            counts[2] += len(found)
            counts[3] += 1
            waiting[ahead] = None

    def forget_waiting(self) -> None:
        """Predictions not yet compared are dropped: their sequence has ended."""
        L, A = self._shape
        self._wanted_LA = [[None] * A for _ in range(L)]

    def _counted(self, kind: int) -> np.ndarray:
        return np.array(self._counts, np.int64)[:, :, kind]

    hits_LA = property(lambda self: self._counted(0))
    predicted_LA = property(lambda self: self._counted(1))
    chosen_LA = property(lambda self: self._counted(2))
    rounds_LA = property(lambda self: self._counted(3))

    @property
    def recall_LA(self) -> np.ndarray:
        """Share of the chosen experts that were predicted; NaN where none was."""
        return ratio(self.hits_LA, self.chosen_LA)

    @property
    def precision_LA(self) -> np.ndarray:
        """Share of the predicted experts that were chosen; NaN where none was."""
        return ratio(self.hits_LA, self.predicted_LA)

    @property
    def recall_A(self) -> np.ndarray:
        """The same over all layers."""
        return ratio(self.hits_LA.sum(axis=0), self.chosen_LA.sum(axis=0))

    @property
    def precision_A(self) -> np.ndarray:
        """The same over all layers."""
        return ratio(self.hits_LA.sum(axis=0), self.predicted_LA.sum(axis=0))

    def summary(self) -> dict:
        """JSON-ready: totals by look-ahead and by layer, None instead of NaN."""
        return {
            "recall": plain_numbers(self.recall_A),
            "precision": plain_numbers(self.precision_A),
            "rounds": self.rounds_LA.sum(axis=0).tolist(),
            "recall_by_layer": plain_numbers(self.recall_LA),
            "precision_by_layer": plain_numbers(self.precision_LA),
        }


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where whole is zero."""
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)
