"""Predictors by name."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from moe_edge.core.checks import ConfigError, check_known, check_options
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


def get_predictor(name: str, **options) -> Predictor:
    """The predictor called `name`; options are the fields of its class.

    Raises:
      ConfigError: an unknown name or option, one of another type, or a missing one.
    """
    check_predictor(name, options)
    return PREDICTORS[name](**options)


def check_predictor(
    name: str, options: Mapping[str, Any], later: Collection[str] = ()
) -> None:
    """Refuses what `get_predictor` would refuse, before all options are there.

    Args:
      later: options that the run adds.
    """
    check_known("predictor", name, PREDICTORS)
    kind = PREDICTORS[name]
    check_options(f"predictor {name}", kind, options)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    needed = [f.name for f in fields if f.default is dataclasses.MISSING]
    if missing := [n for n in needed if n not in options and n not in later]:
        raise ConfigError(
            f"predictor {name} got no {', '.join(missing)}; give it in "
            "predictor_options"
        )
