"""Replays a route trace through a predictor: recall and precision, without a model.

What is predicted after layer l for the j-th layer after it is compared with what the
router then chose there; past the last layer the next token begins.
"""

from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import PREDICTORS, Predictor
from moe_edge.predict.predictor_run import PredictorRun
from moe_edge.simulate.replay.lookups import (
    cache_spec,
    check_horizon,
    made_for,
    observations,
    replayable,
)
from moe_edge.workload.traces import DECODE, Trace


def replay_predictor(
    trace: Trace, predictor: Predictor, horizon: int = 1
) -> PredictionLog:
    """Passes all lookups to a predictor and compares what it says with what came.

    As in an engine prompts are observed only: what it says after a decode step's layer
    is compared.

    Args:
      predictor: as `predictor_of` builds it.
      horizon: layers to look ahead, at most all of them.
    Raises:
      ConfigError: a bad horizon.
    """
    check_horizon(horizon, trace)
    predictor_run = PredictorRun(predictor, cache_spec(trace, (-1,)), horizon)
    for routed in observations(trace):
        if routed.new_sequence:
            predictor_run.finish_sequences()
        routed.show(predictor_run)
        if routed.phase == DECODE:
            predictor_run.predict(routed.layer)
    return predictor_run.accuracy


def known_predictors(trace: Trace) -> list[str]:
    """Names of the predictors whose needs the trace holds."""
    return [name for name in replayable(PREDICTORS, trace) if name != "none"]


def predictor_of(
    predictor: str | type | Predictor, trace: Trace, **options
) -> Predictor:
    """The predictor of a name, a class or an object; the oracle gets the trace's own
    choices.

    Args:
      options: of a name or a class.
    Raises:
      ConfigError: an unknown name, or needs the trace does not hold.
    """
    return made_for(PREDICTORS, predictor, trace, options)
