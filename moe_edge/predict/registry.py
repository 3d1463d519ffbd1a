"""Predictors by name."""

from moe_edge.core.plug_in import Registry
from moe_edge.predict.activation_matrix import ActivationMatrix
from moe_edge.predict.base import Predictor
from moe_edge.predict.history import Frequency, PreviousToken
from moe_edge.predict.oracle import Oracle
from moe_edge.predict.probe import Probe
from moe_edge.predict.shadow import Shadow
from moe_edge.predict.stale_gate import GatePredictor, PartialState, StaleGate

_SEEN = (PreviousToken, Frequency, ActivationMatrix)  # from what sequences chose
_COMPUTED = (StaleGate, GatePredictor, Probe, PartialState)  # by programs of the engine
PREDICTORS: dict[str, type[Predictor]] = {
    kind.name: kind for kind in (Predictor, *_SEEN, *_COMPUTED, Shadow, Oracle)
}


PREDICTOR_KINDS = Registry("predictor", Predictor, PREDICTORS, "predictor_options")


def get_predictor(predictor: str | type | Predictor, **options) -> Predictor:
    """The predictor of a name, a class, or an object; options are fields of its class.

    Raises:
      ConfigError: an unknown name or option, one of another type, or a missing one.
    """
    return PREDICTOR_KINDS.make(predictor, options)
