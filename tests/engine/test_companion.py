"""A predictor that is an engine itself: what engines ask of it, without a paper's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.predict.base import Predictor, best_first, no_prediction
from tests.support.layered import NINE, assert_same_bits, layered
from tests.support.tiny_models import ALL

STEPS, SIZE = 6, 7


class Ahead:
    """Says that every layer will choose its first experts."""

    num_bytes = SIZE

    def __init__(self, config):
        self.config, self.prompts, self.steps = config, [], 0

    def num_compiled(self):
        return 0

    def at_k(self, k):
        return self

    def note_prompts(self, session, prompts):
        self.prompts += prompts

    def step(self, session, tokens_B, active_B):
        self.steps += 1
        first_BK = jnp.arange(self.config.moe.top_k, dtype=jnp.int32)[None]
        layers = range(self.config.num_layers)
        moe = self.config.moe_layers
        return [first_BK if layer in moe else None for layer in layers]


@dataclasses.dataclass(frozen=True)
class Told(Predictor):
    """Names what its companion chose."""

    name = "told"
    needs = frozenset({"shadow"})
    observes = False

    def companion(self, weights, store, made=None):
        return AHEAD

    def companion_bytes(self, weights, records):
        return SIZE

    def init(self, spec):
        return {"wanted_LE": np.zeros((0, spec.num_experts), np.float32)}

    def store(self, state, layer, wanted_NE):
        return {"wanted_LE": np.asarray(wanted_NE, np.float32)}

    def predict(self, state, layer, horizon):
        wanted_NE = state["wanted_LE"][layer + 1 :][:horizon]
        return best_first(wanted_NE) if len(wanted_NE) else no_prediction(horizon)


AHEAD = Ahead(ALL["gqa"])


def test_a_companion_runs_before_every_token_and_is_prefetched_for():
    engine = layered("gqa", np.float32, 9, with_trace=False, predictor=Told)
    assert_same_bits(engine, "gqa", np.float32, NINE, steps=STEPS)
    assert AHEAD.steps == STEPS and [*map(len, AHEAD.prompts)] == [*NINE]
    assert engine.report()["shadow_bytes"] == SIZE
    asked = engine.predictor_run.accuracy
    assert asked.rounds_LA.sum() > 0, "its choices were held against the routing"


def test_a_predictor_that_needs_a_shadow_and_makes_none_is_refused():
    class Lost(Predictor):
        name, needs = "lost", frozenset({"shadow"})

    with pytest.raises(ConfigError, match="predictor lost needs a shadow and does not"):
        layered("gqa", np.float32, 9, with_trace=False, predictor=Lost)
