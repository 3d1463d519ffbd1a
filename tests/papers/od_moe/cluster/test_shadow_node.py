"""Main node and shadow without sockets: the same choices as beside the model.

What the main node posts goes straight to the shadow. Keys and values come at the right
positions, so a shadow in another process names what one in this process would.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.cluster.roles import FIRST_WORKER, MAIN, SHADOW
from moe_edge.model import kv_cache
from moe_edge.papers.od_moe.cluster.groups import Groups
from moe_edge.papers.od_moe.cluster.main_engine import ShadowLink
from moe_edge.papers.od_moe.cluster.shadow_node import ShadowNode
from moe_edge.papers.od_moe.shadow.engine import make_shadow
from moe_edge.papers.od_moe.shadow.follower import Course, Follower, read_choices
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from tests.support.layered import CAPACITY, resident_of
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, random_prompts

NAME, DTYPE, STEPS, LENGTH = "gqa", np.float32, 9, 9
CONFIG = ALL[NAME]
LAYERS, K = list(CONFIG.moe_layers), CONFIG.moe.top_k


@functools.cache
def shadow_of(name, precision):
    return make_shadow(resident_of(name, DTYPE).weights, precision)


class Posts:
    """Hands posts to the shadow at once, and keeps all others.

    Attributes:
      predicted: count -> experts, as the main node knows them last.
      loads: (worker, count, layer, experts) in order; passed: (worker, count).
      kv: (first position, positions) of each alignment; kv_dtypes: of their arrays.
    """

    def __init__(self):
        self.shadow, self.predicted = None, {}
        self.loads, self.passed, self.kv, self.kv_dtypes = [], [], [], set()

    def post(self, peer, name, fields=None, arrays=None):
        if peer == SHADOW:
            if name == "rows":
                self.kv.append((fields["start"], arrays["kv0"].shape[2]))
                self.kv_dtypes |= {array.dtype for array in arrays.values()}
            self.shadow.control(MAIN, name, fields, arrays)
            self.shadow._attend()
        elif peer == MAIN:
            assert name == "predicted"
            self.predicted.update(enumerate(fields["experts"], fields["first"]))
        elif name == "load":
            for where in fields["layers"]:
                self.loads.append((peer - FIRST_WORKER, *where))
        elif name == "passed":
            self.passed.append((peer - FIRST_WORKER, fields["count"]))


def nodes(precision, periods, speculative, name=NAME):
    """The posts, the main node's end, and the shadow's node."""
    posts, groups, config = Posts(), Groups(2, 2, K), ALL[name]
    shadow = None if precision is None else shadow_of(name, precision)
    shape = config.moe_layers, config.moe.num_experts, K
    where = SHADOW, posts, groups, *shape, shadow, periods
    posts.shadow = ShadowNode(*where, speculative=speculative)
    posts.shadow._waiting.put(("prepare", {"number": 1}, {}))
    posts.shadow._attend()
    return posts, ShadowLink(posts, groups, periods), posts.shadow


def run(precision, periods, speculative=False, name=NAME, steps_before=1, forced=True):
    """A text with random tokens, at the main node and beside it.

    Returns:
      (posts, shadow node, a list of the experts [L, K] of every step by the course)
    """
    engine = resident_of(name, DTYPE)
    posts, link, node = nodes(precision, periods, speculative, name)
    (prompt,) = random_prompts(engine.config, [LENGTH])
    (tokens,) = random_prompts(engine.config, [STEPS], seed=1)
    session, active_B = engine.new_session(1, CAPACITY), jax.numpy.ones(1, bool)
    last = steps_before * len(engine.config.moe_layers) - 1
    link.begin(session, [prompt], steps_before, last)
    logits_BV = engine.prefill(session, [prompt])
    course = Course(Follower(shadow_of(name, precision), 1, CAPACITY), periods)
    course.begin([prompt])
    beside = []
    for step, token in enumerate(tokens, 1):
        if not forced:
            token = int(np.asarray(logits_BV)[0].argmax())
        token_B = jax.device_put(np.array([token], np.int32))
        link.rows(session, step)
        link.token(session, step, token)
        choices = course.step(session.caches, token_B, active_B)
        beside.append(read_choices(choices, 1, K)[list(ALL[name].moe_layers), 0])
        logits_BV = engine.decode(session, token_B, active_B)
    return posts, node, beside


def named(posts, step, steps_before=1, name=NAME) -> np.ndarray:
    """What the main node knows of a step (from 1): [L, K]."""
    layers = len(ALL[name].moe_layers)
    first = (steps_before + step - 1) * layers
    return np.array([posts.predicted[first + i] for i in range(layers)])


@pytest.mark.parametrize(
    "token, kv", [(1, 1), (1, 2), (1, 3), (3, 2), (2, 3), (0, 3), (3, 0), (0, 0)]
)
def test_late_shadow_names_what_one_beside_the_model_names(token, kv):
    periods = Shadow("nf4", token, kv)
    posts, node, beside = run("nf4", periods)
    for step, expected_LK in enumerate(beside, 1):
        np.testing.assert_array_equal(named(posts, step), expected_LK)
    assert node.restarts == 0
    due = [s for s in range(2, STEPS + 1) if kv and (s - 1) % kv == 0]
    ends = [(LENGTH + s - 1 - kv, kv) for s in due]
    assert posts.kv == ([(0, LENGTH)] if kv else []) + ends


@pytest.mark.slow
@pytest.mark.parametrize("forced", [True, False])
def test_a_shadow_ahead_takes_states_back_and_waits_for_those_that_are_due(forced):
    """What it names last is what one names that waits for everything."""
    precision = "int8" if forced else "full"  # which foresees every token
    how = {"speculative": True, "name": "states", "forced": forced}
    posts, node, beside = run(precision, Shadow(precision, 1, 3), **how)
    for step, expected_LK in enumerate(beside, 1):
        found_LK = named(posts, step, name="states")
        np.testing.assert_array_equal(found_LK, expected_LK)
    ahead = [step for step in range(2, STEPS + 1) if (step - 1) % 3]
    assert node.restarts == (len(ahead) if forced else 0)


@pytest.mark.slow
def test_latent_caches_travel_as_well():
    posts, _, beside = run("int8", Shadow("int8", 1, 2), name="mla")
    for step, expected_LK in enumerate(beside, 1):
        np.testing.assert_array_equal(named(posts, step), expected_LK)


@pytest.mark.parametrize(
    ("kind", "stored"), [("bfloat16", np.uint16), *slow(("q8_0", np.uint8))]
)
def test_caches_in_fewer_bytes_travel_as_they_are_stored(kind, stored, monkeypatch):
    name = f"{kind} caches"
    wide = dataclasses.replace(CONFIG.attention, head_dim=64, v_head_dim=32)
    config = dataclasses.replace(CONFIG, attention=wide).with_cache(kind)
    monkeypatch.setitem(ALL, name, config)
    posts, _, beside = run("int8", Shadow("int8", 1, 2), name=name)
    assert posts.kv_dtypes == {np.dtype(stored)}
    for step, expected_LK in enumerate(beside, 1):
        np.testing.assert_array_equal(named(posts, step, name=name), expected_LK)


def test_caches_of_layers_that_differ_travel_as_well():
    _, link, node = nodes("int8", Shadow("int8", 1, 2), False, name="mixed")
    engine, zero_B = resident_of("mixed", DTYPE), jnp.zeros(1, jnp.int32)
    session = engine.new_session(1, CAPACITY)
    link.begin(session, [[1, 2, 3]], 0, -1)
    engine.prefill(session, [[1, 2, 3]])
    link.token(session, 1, 7)
    pairs = zip(session.caches, node._follower.session.caches, strict=True)
    for model, shadow in pairs:
        for name, array in model.items():
            found = [kv_cache.read(each, zero_B, 3) for each in (array, shadow[name])]
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kv", [1, 2])
def test_speculative_full_shadow_names_what_the_model_chooses(kv):
    """Tokens are random, so it starts over at every step, and ends up right."""
    posts, node, beside = run("full", Shadow("full", 1, kv), speculative=True)
    for step, expected_LK in enumerate(beside, 1):
        np.testing.assert_array_equal(named(posts, step), expected_LK)
    assert node.restarts == STEPS - 1  # the first step waits for the prompt
    own = run("full", Shadow("full", 1, kv), speculative=True, forced=False)
    assert own[1].restarts == 0
    for step, expected_LK in enumerate(own[2], 1):
        np.testing.assert_array_equal(named(own[0], step), expected_LK)


def test_speculative_shadow_is_a_step_ahead_and_late_one_is_not():
    for speculative in (False, True):
        posts, link, _ = nodes("full", Shadow("full"), speculative)
        engine = resident_of(NAME, DTYPE)
        session = engine.new_session(1, CAPACITY)
        link.begin(session, [[1, 2, 3]], 5, 9)
        engine.prefill(session, [[1, 2, 3]])
        assert posts.predicted == {}
        link.token(session, 1, 7)
        counts = [10, 11, 12, 13] if speculative else [10, 11]
        assert sorted(posts.predicted) == counts


def test_every_layer_is_shared_out_in_its_own_group():
    posts, _, _ = run("full", Shadow("full"), steps_before=4)
    assert len(posts.loads) == len(LAYERS) * STEPS
    for worker, count, layer, experts in posts.loads:
        assert worker == count % 2 and layer == LAYERS[count % len(LAYERS)]
        assert experts == posts.predicted[count]
    # The text before was over: what the shadow had said of its next step is nothing.
    assert posts.passed == [(0, 7), (1, 7)]


def test_random_shadow_is_a_step_ahead_and_names_each_step_once():
    posts, link, _ = nodes(None, Shadow("full", 0, 0), False)
    session = resident_of(NAME, DTYPE).new_session(1, CAPACITY)
    link.begin(session, [[1, 2, 3]], 0, -1)
    for step in (1, 2, 3):
        link.token(session, step, 1)
        assert len(posts.predicted) == len(posts.loads) == (step + 1) * len(LAYERS)
    for experts in posts.predicted.values():
        assert len(set(experts)) == K and max(experts) < CONFIG.moe.num_experts


def test_shadow_that_is_full_stops_ahead_of_the_model():
    """It must not write beyond the text's capacity."""
    posts, link, _ = nodes("full", Shadow("full"), True)
    session = resident_of(NAME, DTYPE).new_session(1, CAPACITY)
    (prompt,) = random_prompts(CONFIG, [CAPACITY - 2])
    link.begin(session, [prompt], 1, 1)
    for step in (1, 2):
        link.token(session, step, 3)
    assert sorted(posts.predicted) == [2, 3, 4, 5]
