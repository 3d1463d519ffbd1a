"""Replays a route trace through a predictor: recall and precision, without a model.

What is predicted after layer l for the j-th layer after it is compared with what the
router then chose there; past the last layer the next token begins.
"""

import dataclasses

import numpy as np

from moe_edge.predict.accuracy import ratio
from moe_edge.predict.base import Predictor
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.predict.registry import PREDICTORS, get_predictor
from moe_edge.simulate.replay.lookups import (
    cache_spec,
    check_holds,
    check_horizon,
    context_of,
    lookups,
)
from moe_edge.workload.traces import DECODE, Trace


@dataclasses.dataclass(frozen=True)
class PredictorResult:
    """Counts of distinct experts over all decode steps.

    Axes: H look-ahead (row j: j + 1 layers before), L the layer predicted.

    Attributes:
      predictor: its name.
      hits_HL: int, predicted and chosen.
      predicted_HL: int, predicted.
      chosen_HL: int, chosen where a prediction was due.
    """

    predictor: str
    hits_HL: np.ndarray
    predicted_HL: np.ndarray
    chosen_HL: np.ndarray

    @property
    def recall_HL(self) -> np.ndarray:
        """Share of the chosen that were predicted; nan without choices."""
        return ratio(self.hits_HL, self.chosen_HL)

    @property
    def precision_HL(self) -> np.ndarray:
        """Share of the predicted that were chosen; nan without predictions."""
        return ratio(self.hits_HL, self.predicted_HL)

    @property
    def recall_H(self) -> np.ndarray:
        """Over all layers."""
        return ratio(self.hits_HL.sum(axis=1), self.chosen_HL.sum(axis=1))

    @property
    def precision_H(self) -> np.ndarray:
        """Over all layers."""
        return ratio(self.hits_HL.sum(axis=1), self.predicted_HL.sum(axis=1))


def replay_predictor(
    trace: Trace, predictor: Predictor, horizon: int = 1
) -> PredictorResult:
    """Passes all lookups to a predictor and compares what it says with what came.

    Prefill rows are observed and not scored.

    Args:
      trace: what was routed.
      predictor: as `predictor_of` builds it.
      horizon: H, layers to look ahead, at most all of them.
    Raises:
      ConfigError: the trace lacks what the predictor needs, or a bad horizon.
    """
    check_holds("predictor", predictor.name, predictor.needs, trace)
    check_horizon(horizon, trace)
    predictor_run = PredictorRun(predictor, cache_spec(trace, (-1,)), horizon)
    log = predictor_run.accuracy
    for routed in lookups(trace):
        layer, is_decode = routed.layer, routed.phase == DECODE
        if routed.new_sequence:
            predictor_run.finish_sequences()
        predictor_run.observe(layer, routed.ids_TK, routed.scores_TE, counts=is_decode)
        predictor_run.predict(layer)
    counts = log.hits_LA.T, log.predicted_LA.T, log.chosen_LA.T
    return PredictorResult(predictor.name, *counts)


def known_predictors(trace: Trace) -> list[str]:
    """Names of the predictors whose needs the trace holds."""
    return [
        name
        for name, kind in PREDICTORS.items()
        if name != "none" and kind.needs <= trace.holds
    ]


def predictor_of(name: str, trace: Trace) -> Predictor:
    """A predictor by name; the oracle gets the trace's own choices.

    Raises:
      ConfigError: an unknown name, or needs the trace does not hold.
    """
    if name not in PREDICTORS:
        return get_predictor(name)  # refuses it
    check_holds("predictor", name, PREDICTORS[name].needs, trace)
    return get_predictor(name, **context_of(trace).fill(PREDICTORS[name], {}))
