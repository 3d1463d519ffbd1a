"""Predictors by name."""

import dataclasses

from moe_edge.core.checks import ConfigError, check_known, check_options
from moe_edge.predict.activation_matrix import ActivationMatrix
from moe_edge.predict.base import Predictor
from moe_edge.predict.history import Frequency, PreviousToken
from moe_edge.predict.oracle import Oracle
from moe_edge.predict.stale_gate import GatePredictor, PartialState, StaleGate

PREDICTORS: dict[str, type[Predictor]] = {
    kind.name: kind
    for kind in (
        Predictor,
        PreviousToken,
        Frequency,
        StaleGate,
        GatePredictor,
        PartialState,
        ActivationMatrix,
        Oracle,
    )
}


def get_predictor(name: str, **options) -> Predictor:
    """The predictor of that name.

    Args:
      name: a key of `PREDICTORS`.
      **options: fields of its class.
    Raises:
      ConfigError: an unknown name or option, one of another type, or a missing one.
    """
    check_known("predictor", name, PREDICTORS)
    kind = PREDICTORS[name]
    check_options(f"predictor {name}", kind, options)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    missing = [n for n in needed if n not in options]
    if missing:
        raise ConfigError(
            f"predictor {name} got no {', '.join(missing)}, expected "
            f"{', '.join(needed)}; pass them as options"
        )
    return kind(**options)
