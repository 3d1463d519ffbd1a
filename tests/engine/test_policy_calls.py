"""What engines promise policies and predictors of their users: who is called, when."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.offload.assist_base import Assist
from moe_edge.predict.base import Predictor, best_first
from moe_edge.route.base import Route, TopK
from tests.support.layered import (
    BLOCKS,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
    resident_of,
)
from tests.support.slow_cases import slow
from tests.support.tiny_models import GQA, random_prompts

BITS, THREE = ("gqa", np.float32, (9,)), (7, 3, 9)
STEPS, (E, K) = 4, (GQA.moe.num_experts, GQA.moe.top_k)
MOE_LAYERS = list(GQA.moe_layers)
calls: list = []  # of the policy under test, by engine


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@dataclasses.dataclass(frozen=True)
class Named(Route):
    """Returns the model's own choice, and says so."""

    name, SOURCE, lossless = "named", "a test", True
    needs_resident = False  # no engine reads it

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        assert resident_E.shape == (E,) and scores_TE.shape[1] == params.num_experts
        calls.append((layer, ids_TK.shape))
        return ids_TK, weights_TK


class Derived(TopK):
    """A class of its own, though derived from the only one that is never called."""

    name = "derived"

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        calls.append((layer, ids_TK.shape))
        return ids_TK, weights_TK


@pytest.fixture(params=[Named, Derived])
def route(request):
    return request.param


@pytest.mark.parametrize("slots", [9, 2])  # 2: decoding runs in waves
def test_layered_calls_every_route_once_a_layer_and_token_decoded(route, slots):
    engine = layered(*BITS[:2], slots, route=route)
    assert_same_bits(engine, *BITS, steps=STEPS)
    shape_TK = 1, K
    assert calls == [(layer, shape_TK) for _ in range(STEPS) for layer in MOE_LAYERS]
    assert engine.lossless and engine.report()["route"] == route.name
    assert engine.moved().routed == STEPS * len(MOE_LAYERS) * K


def test_fused_calls_every_route_in_its_program_of_a_step(route):
    options = OffloadOptions(
        device_memory=f"{100 * 9 / BLOCKS}%", mode="fused", route=route
    )
    engine = make_offloaded(StoreReader(GQA), options)
    assert calls == [(MOE_LAYERS[0], (1, K))], "traced once before it is used"
    calls.clear()
    assert_same_bits(engine, *BITS, steps=STEPS)
    # When the program was made; it runs each step, and counts the pairs it handed over.
    assert [layer for layer, _ in calls] == MOE_LAYERS
    assert engine.lossless and engine.report()["route"] == route.name
    assert engine.moved().routed == STEPS * len(MOE_LAYERS) * K


class Shifted(Named):
    """Chooses each expert's neighbour, in arrays of jax.numpy."""

    name, lossless = "shifted", False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        shifted_TK = jnp.where(jnp.asarray(ids_TK) < E, (ids_TK + 1) % E, E)
        return shifted_TK, jnp.asarray(weights_TK)


@pytest.mark.parametrize("rows", [1, 9])  # by pairs, and by blocks
def test_another_choice_is_computed_in_waves_too(rows):
    prompts, logits = random_prompts(GQA, rows * [9]), []
    for slots in (24, 2):
        engine = layered(*BITS[:2], slots, with_trace=False, route=Shifted)
        logits.append(forced_logits(engine, prompts, 2))
        assert engine.moved().substituted == engine.moved().routed > 0
    np.testing.assert_array_equal(*logits)
    own = forced_logits(layered(*BITS[:2], 24, with_trace=False), prompts, 2)
    assert (own[0] == logits[0][0]).all(), "a prompt is the model's own choice"
    assert (own[1:] != logits[0][1:]).any(axis=(0, 2)).all()


@dataclasses.dataclass(frozen=True)
class Watching(Predictor):
    """Names nothing, and keeps what it is shown."""

    name, needs = "watching", frozenset({"ids", "hidden", "scores"})

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        calls.append((layer, hidden_TD, ids_TK, scores_TE))
        return state


class OfPrompts(Watching):
    whole_prompt = True


class PerSequence(Watching):
    per_sequence = True


def seen_by(kind, lengths, steps=STEPS):
    engine = layered("gqa", np.float32, 9, with_trace=False, predictor=kind)
    forced_logits(engine, random_prompts(GQA, lengths), steps)
    return [call for call in calls if call[0] == MOE_LAYERS[0]]


def assert_belongs_together(call):
    """The layer's router, run on the states, gives the choice and its scores."""
    layer, hidden_TD, ids_TK, scores_TE = call
    weight_ED = np.asarray(
        resident_of("gqa", np.float32).weights.layers[layer]["router.weight"]
    )
    logits_TE = np.asarray(hidden_TD) @ weight_ED.T
    real_T = ids_TK[:, 0] < E
    assert len(hidden_TD) == len(ids_TK) == len(scores_TE) and real_T.any()
    np.testing.assert_array_equal(
        np.argsort(-logits_TE, axis=1)[real_T, :K], ids_TK[real_T]
    )
    shares_TE = np.asarray(jax.nn.softmax(logits_TE, axis=1))
    np.testing.assert_allclose(scores_TE[real_T], shares_TE[real_T], rtol=1e-4)


@pytest.mark.parametrize(
    "kind, prompt, tokens",
    # A prompt's last token of every row, or all of it with its padding; then a token of
    # every row, or of each sequence alone. One row ends half-way.
    [
        (Watching, [3], STEPS * [3]),
        (OfPrompts, [48], STEPS * [3]),
        (PerSequence, 3 * [1], 2 * [1, 1, 1] + 2 * [1, 1]),
    ],
)
def test_observe_gets_the_states_and_scores_that_it_needs(kind, prompt, tokens):
    seen = seen_by(kind, THREE)
    assert [len(call[2]) for call in seen] == [*prompt, *tokens]
    for call in calls:
        assert_belongs_together(call)


def test_observe_gets_none_of_what_it_does_not_need():
    class Content(Watching):
        needs = frozenset({"ids"})

    seen = seen_by(Content, (9,), steps=1)
    assert len(seen) == 2
    assert all(call[1] is None and call[3] is None for call in calls)


@dataclasses.dataclass(frozen=True)
class OwnGates(Predictor):
    """Runs the next layer's router, with nothing but what the base class promises."""

    name, needs, look_ahead = "own_gates", frozenset({"hidden"}), 1
    layers: tuple = ()
    from_context = {"layers": "dense_layers"}
    per_sequence = True

    def gates_after(self, layer):
        if layer + 1 not in MOE_LAYERS:
            return ()
        flat = self.layers[layer + 1]
        return (
            {"router.weight": flat["router.weight"], "scale": np.ones(40, np.float32)},
        )

    def store(self, state, layer, wanted_NE):
        calls.append((layer, wanted_NE.shape))
        return {"layer": layer, "wanted_NE": np.asarray(wanted_NE)}

    def predict(self, state, layer, horizon):
        if state.get("layer") != layer:
            return super().predict(state, layer, horizon)
        return best_first(state["wanted_NE"])


def test_store_reaches_every_running_sequence():
    engine = layered("gqa", np.float32, 9, with_trace=False, predictor=OwnGates)
    assert_same_bits(engine, "gqa", np.float32, THREE, steps=STEPS)
    first = MOE_LAYERS[0]
    assert calls == 2 * 3 * [(first, (1, E))] + 2 * 2 * [(first, (1, E))]
    assert engine.predictor_run.accuracy.summary()


def test_the_base_predictor_answers_all_that_engines_ask():
    class Plain(Predictor):
        name = "plain"

        def gates_after(self, layer):
            return OwnGates(engine.weights.layers).gates_after(layer)

    class Partial(Predictor):
        name, needs = "partial", frozenset({"partial_state"})

    for kind in (Plain, Partial):
        engine = layered("gqa", np.float32, 9, with_trace=False, predictor=kind)
        assert_same_bits(engine, "gqa", np.float32, THREE, steps=STEPS)


@dataclasses.dataclass(frozen=True)
class Rest(Assist):
    """The host computes all absent experts but the first."""

    name = "rest"

    def take(self, absent, ids_TK, costs):
        calls.append((absent, ids_TK, costs))
        return absent[1:]


@pytest.mark.parametrize("given", [Rest, Rest()], ids=["class", "object"])
def test_layered_asks_an_assist_once_a_layer_about_what_is_absent(given):
    engine = layered("gqa", np.float32, 9, with_trace=False, assist=given)
    forced_logits(engine, random_prompts(GQA, [9]), STEPS)
    assert 0 < len(calls) <= STEPS * len(MOE_LAYERS)
    for absent, ids_TK, costs in calls:
        assert ids_TK.shape == (1, K) and absent and {*absent} <= {*ids_TK[0].tolist()}
        assert costs.load_s > 0 < costs.host_s and costs.device_s == 0
    helped = sum(len(absent) - 1 for absent, _, _ in calls)
    assert engine.report()["host_computed"] == helped > 0
    with pytest.raises(ConfigError, match="mode fused has no assist; use mode layered"):
        OffloadOptions(mode="fused", assist=given)


def test_what_is_no_assist_is_refused():
    with pytest.raises(
        ConfigError, match=r"CPU assist is 3, expected a name \(all, .*of Assist"
    ):
        OffloadOptions(assist=3)
    with pytest.raises(ConfigError, match="Assist'>, expected a name"):
        OffloadOptions(assist=Assist)


@dataclasses.dataclass(frozen=True)
class Astray(Route):
    """Chooses what is no expert, or too few of them."""

    shift: int = 0
    width: int = K
    name, lossless = "astray", False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        return (ids_TK + self.shift)[:, : self.width], weights_TK


@pytest.mark.parametrize(
    "route, said",
    [
        (Astray(shift=E), rf"route astray gave ids \[1.*expected ids from 0 to {E}"),
        (Astray(shift=-E), r"route astray gave ids \[-\d+"),
        (Astray(width=1), r"ids_TK of route astray has shape \(1, 1\), expected"),
    ],
)
def test_route_that_chooses_what_is_no_expert_is_refused_by_name(route, said):
    engine = layered("gqa", np.float32, 9, with_trace=False, route=route)
    with pytest.raises(ConfigError, match=said):
        forced_logits(engine, random_prompts(GQA, [9]), STEPS)


def test_route_of_other_shapes_is_refused_before_it_is_compiled():
    given = {"device_memory": f"{100 * 9 / BLOCKS}%", "mode": "fused"}
    options = OffloadOptions(**given, route=Astray(width=1))
    with pytest.raises(ConfigError, match=r"astray gave arrays of shapes \[\(1, 1\)"):
        make_offloaded(StoreReader(GQA), options)


class Changed(Named):
    """What is made of the model's own choice by a function, under a name of its own."""

    name, lossless = "changed", False

    def __init__(self, change):
        object.__setattr__(self, "change", change)

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        return self.change(ids_TK, weights_TK)


def fused(route, rows=1):
    given = {"device_memory": f"{100 * 9 / BLOCKS}%", "mode": "fused"}
    options = OffloadOptions(**given, route=route)
    return make_offloaded(StoreReader(GQA), options, batch=rows)


def same_expert(ids_TK, weights_TK):
    return ids_TK * 0 + ids_TK[:, :1], weights_TK


@pytest.mark.parametrize("rows", [*slow(1), 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda ids_TK, weights_TK: (ids_TK + 64, weights_TK),
        *slow(lambda ids_TK, weights_TK: (ids_TK - 64, weights_TK)),
        *slow(lambda ids_TK, weights_TK: (ids_TK, weights_TK * np.float32(np.nan))),
        same_expert,
    ],
    ids=["beyond", "below", "nan", "same"],
)
def test_fused_refuses_a_choice_that_cannot_be_computed_and_goes_on(change, rows):
    engine, prompts = fused(Changed(change), rows), random_prompts(GQA, rows * [9])
    for _ in range(2):  # what it counted is gone after an error
        said = (
            rf"route policy changed chose what cannot .*, {rows * len(MOE_LAYERS)} ti"
        )
        with pytest.raises(ConfigError, match=said):
            forced_logits(engine, prompts, 2)
        assert int(engine._state.refused) == 0
    assert fused("substitute")._state.refused is None, "ours are not counted"


def test_fused_computes_the_models_choice_where_a_routes_cannot_be():
    engine = fused(Changed(lambda ids_TK, weights_TK: (ids_TK + 64, weights_TK)))
    engine._check_plug_ins = lambda: None
    assert_same_bits(engine, *BITS, steps=STEPS)
    engine = fused(Changed(lambda ids_TK, weights_TK: (ids_TK * 0 + E, weights_TK * 0)))
    forced_logits(engine, random_prompts(GQA, [9]), 2)  # no expert at all is a choice


KINDS = [
    (lambda i_TK, w_TK: (i_TK.astype(np.float32), w_TK), r"\('float32', 'float32'\)"),
    (lambda i_TK, w_TK: (i_TK, w_TK > 0), r"\('int32', 'bool'\)"),
    (lambda i_TK, w_TK: None, "None"),
    (lambda i_TK, w_TK: (i_TK, w_TK, w_TK), ""),
    (lambda i_TK, w_TK: ([0, 1], w_TK), ""),
]


@pytest.mark.parametrize("change, got", KINDS)
def test_route_of_other_types_is_refused_by_name_in_both_modes(change, got):
    said = rf"route policy changed: route gave .*{got}.*, expected \(ids int32, weights"
    with pytest.raises(ConfigError, match=said):
        fused(Changed(change if got else lambda i, w: tuple(change(i, w))))
    engine = layered("gqa", np.float32, 9, with_trace=False, route=Changed(change))
    with pytest.raises(ConfigError, match=said):
        forced_logits(engine, random_prompts(GQA, [9]), 1)


def test_route_whose_shape_is_wrong_for_several_rows_is_refused_in_mode_fused():
    engine = fused(Changed(lambda ids_TK, weights_TK: (ids_TK[:1], weights_TK)), 2)
    said = rf"ids_TK of route changed has shape \(1, {K}\), expected \(2, {K}\)"
    with pytest.raises(ConfigError, match=said):
        forced_logits(engine, random_prompts(GQA, [9, 9]), 1)


@pytest.mark.parametrize("rows", [1, 9])
def test_layered_refuses_a_route_that_repeats_an_expert_in_a_row(rows):
    route = Changed(same_expert)
    engine = layered("gqa", np.float32, 9, with_trace=False, route=route)
    said = rf"route changed gave one token the ids \[(\d+), \1.*, {E} where there is no"
    with pytest.raises(ConfigError, match=said):
        forced_logits(engine, random_prompts(GQA, rows * [9]), 1)
    nothing = Changed(lambda ids_TK, weights_TK: (ids_TK * 0 + E, weights_TK * 0))
    engine = layered("gqa", np.float32, 9, with_trace=False, route=nothing)
    forced_logits(engine, random_prompts(GQA, rows * [9]), 1)


@dataclasses.dataclass(frozen=True)
class Guess(Predictor):
    """Names expert 0 of every layer, or what it is told to."""

    name, needs, shape, expert = "guess", frozenset({"ids"}), (1, 1), 0

    def predict(self, state, layer, horizon):
        found = np.full(self.shape, self.expert)
        if self.expert == 0 and (layer + 1) % GQA.num_layers not in MOE_LAYERS:
            found[:] = -1
        return found, np.ones(self.shape, np.float32)


class Guesses(Guess):
    shape = 2, 1


class NoExpert(Guess):
    expert = E


class OfDense(Guess):
    expert = 1


def decode_with(kind):
    engine = layered("gqa", np.float32, 9, with_trace=False, predictor=kind)
    forced_logits(engine, random_prompts(GQA, [9]), STEPS)


@pytest.mark.parametrize("kind", [Guesses, NoExpert, OfDense])
def test_predictor_that_names_what_is_no_expert_is_refused_by_name(kind):
    decode_with(Guess)
    with pytest.raises(ConfigError, match=rf"predictor {kind.__name__} gave after lay"):
        decode_with(kind)
