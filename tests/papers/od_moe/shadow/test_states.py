"""A shadow of a model whose layers have states takes them whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.od_moe.shadow.engine import cut_kv, make_shadow, widen_kv
from moe_edge.papers.od_moe.shadow.follower import Follower, read_choices
from moe_edge.papers.od_moe.studies.recorded import record
from tests.support.running import resident, states_of
from tests.support.tiny_models import STATES, random_prompts

CAPACITY = 192


@pytest.mark.slow
def test_shadow_takes_whole_states():
    engine = resident("states")
    shadow = make_shadow(engine.weights, "int8")
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, random_prompts(STATES, [9]))
    chosen, zero_B = [], jnp.zeros(1, jnp.int32)
    for by_message in (False, True):
        follower = Follower(shadow, 1, CAPACITY)
        follower.begin([9])
        if by_message:
            kv = shadow.programs.read_kv(session.caches, zero_B, count=CAPACITY)
            sent = cut_kv(session.caches, jax.device_get(kv), 9)
            follower.align_kv(tuple(widen_kv(session.caches, sent, CAPACITY)), zero_B)
        else:
            follower.copy_all_kv(session.caches)
        both = zip(states_of(follower.session), states_of(session), strict=True)
        assert all(np.array_equal(*pair) for pair in both)
        choices = follower.step(jnp.ones(1, bool), jnp.array([5], jnp.int32))
        chosen.append(read_choices(choices, 1, 3))
    np.testing.assert_array_equal(*chosen)


def test_recorded_runs_are_refused():
    with pytest.raises(ConfigError, match="qwen2_moe keep states"):
        record(resident("states"), [1, 2], 3)
