"""Prediction by a shadow: the model itself at lower precision, run a token ahead.

OD-MoE (arXiv 2512.03927, section 3.2). With tokens, keys and values of its own the
shadow drifts off. So both are overwritten by the model's from time to time ("aligned").
The engine runs the shadow and hands its choices to `store`.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.plug_in import register
from moe_edge.predict.base import NOT_WANTED, Predictor, best_first, no_prediction

# `full` is the model itself; of the others see `shadow/formats.py`.
PRECISIONS = ("full", "fp16", "bf16", "int8", "nf4")


@register
@dataclasses.dataclass(frozen=True)
class Shadow(Predictor):
    """Names the experts of all layers of the coming token.

    Decode steps count from 1. With period n something is aligned before steps 1,
    1 + n, 1 + 2 n, ...; with 0 never.
    """

    precision: str = "int8"
    token_period: int = 1
    kv_period: int = 1
    name: ClassVar[str] = "shadow"
    SOURCE: ClassVar[str] = "OD-MoE: a copy at lower precision runs ahead"
    needs: ClassVar[frozenset[str]] = frozenset({"shadow"})
    observes: ClassVar[bool] = False

    def __post_init__(self):
        check_known("shadow precision", self.precision, PRECISIONS)
        for name in ("token_period", "kv_period"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"shadow {name} must be a whole number, 0 for never, got {value!r}"
                )

    @property
    def needs_prompt(self) -> bool:
        """Whether the shadow runs the prompt itself."""
        return not (self.token_period and self.kv_period)

    def aligns_token(self, step: int) -> bool:
        """Whether decode step `step` begins with the model's token."""
        return is_due(step, self.token_period)

    def aligns_kv(self, step: int) -> bool:
        """Whether the keys and values before decode step `step` become the model's."""
        return is_due(step, self.kv_period)

    def companion(self, weights, store, made=None):
        from moe_edge.papers.od_moe.shadow.engine import shared_shadow
        from moe_edge.papers.od_moe.shadow.follower import LocalShadow

        engines = {} if made is None else made
        return LocalShadow(shared_shadow(weights, self.precision, engines, store), self)

    def companion_bytes(self, weights, records):
        from moe_edge.papers.od_moe.shadow.engine import shadow_bytes

        return shadow_bytes(weights, self.precision, records)

    def init(self, spec):
        """State: `wanted_LE` scores of all layers of the running token."""
        return {"wanted_LE": np.zeros((0, spec.num_experts), np.float32)}

    def store(self, state, layer, wanted_NE):
        """Takes in what the shadow chooses for a token, as far as it has come.

        Args:
          layer: -1, before the token's first.
          wanted_NE: a row for each layer, of `NOT_WANTED` where nothing is known.
        """
        return {"wanted_LE": np.asarray(wanted_NE, np.float32)}

    def predict(self, state, layer, horizon):
        wanted_NE = state["wanted_LE"][layer + 1 :][:horizon]
        if not len(wanted_NE):
            return no_prediction(horizon)
        missing = ((0, horizon - len(wanted_NE)), (0, 0))
        return best_first(np.pad(wanted_NE, missing, constant_values=NOT_WANTED))


def is_due(step: int, period: int) -> bool:
    """Whether what is aligned every `period` steps is aligned before `step`."""
    return period > 0 and (step - 1) % period == 0
