"""A predictor at work: what it has seen, and how right it was."""

import numpy as np

from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import ModelShape, Predictor


class PredictorRun:
    """Joins a predictor, its state and the record of its hits.

    Attributes:
      predictor: names later experts.
      state: what it has seen.
      horizon: layers ahead that it is asked about.
      accuracy: what it named beside what was chosen.
      is_idle: whether it never names anything.
    """

    def __init__(self, predictor: Predictor, spec: ModelShape, horizon: int):
        self.predictor, self.horizon, self._spec = predictor, horizon, spec
        self.is_idle = type(predictor) is Predictor  # the base names nothing
        self._observes = predictor.observes and not self.is_idle
        self.restart()
        self.reset_accuracy()

    def restart(self) -> None:
        """Forgets everything that was seen."""
        self.state = self.predictor.init(self._spec)

    def reset_accuracy(self) -> None:
        """Counts from here on."""
        spec = self._spec
        self.accuracy = PredictionLog(spec.num_layers, spec.num_experts, self.horizon)

    def observe(self, layer: int, ids_TK, scores_TE, counts: bool = True) -> None:
        """Takes in what a layer chose.

        Args:
          counts: compare what had been named for the layer.
        """
        if counts:
            self.accuracy.chosen(layer, ids_TK)
        if self._observes:
            self.state = self.predictor.observe(
                self.state, layer, None, ids_TK, scores_TE
            )

    def store(self, layer: int, wanted_NE) -> None:
        """Takes the scores that an engine's program computed for the predictor."""
        self.state = self.predictor.store(self.state, layer, wanted_NE)

    def predict(self, layer: int) -> np.ndarray:
        """int32 `[horizon, M]` ids for the layers after `layer`; see `Predictor`."""
        ids_NM, _ = self.predictor.predict(self.state, layer, self.horizon)
        self.accuracy.expect(layer, ids_NM)
        return ids_NM

    def learn(self, sequences) -> None:
        """Sees past sequences, which count nowhere; between sequences only.

        Args:
          sequences: per sequence {layer: int32 [T, K] chosen experts}.
        """
        if not self._observes:
            return
        for ids_of in sequences:
            for layer in sorted(ids_of):
                self.observe(layer, ids_of[layer], None, counts=False)
            self.finish_sequence()

    def finish_sequence(self) -> None:
        """What belongs to one sequence goes; what was named and not compared, too."""
        self.state = self.predictor.finish_sequence(self.state)
        self.accuracy.forget_waiting()
