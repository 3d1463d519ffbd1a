"""Gate-based predictors against the routers that they stand for, on tiny models."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moe_edge.convert.families import config_from_hf
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.weights import bind_block, block_graph
from moe_edge.model import kv_cache
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.router import Routing
from moe_edge.model.transformer import embed_tokens, layer_window, make_chunk
from moe_edge.predict.base import get_predictor
from moe_edge.predict.device_scores import partial_gate, scores_ahead, wanted_scores
from moe_edge.predict.probe import neurons_path, probe_path
from moe_edge.predict.stale_gate import DevicePredictor, GatePredictor
from moe_edge.profile.probes import values_of
from tests.predict.support import Shape, rows_of
from tests.support.slow_cases import slow, slow_but
from tests.support.tiny_checkpoints import raw_config
from tests.support.tiny_models import ALL, BF16, random_weights

BATCH, PROMPT, CAPACITY = 2, 7, 16


@functools.cache
def model(name="gqa", dtype=np.float32, dense_layers=(0,)):
    config = ALL[name]
    windows = (None, 9, None, 4) if config.attention.windows else ()
    config = dataclasses.replace(
        config,
        num_layers=4,
        dense_layers=dense_layers,
        attention=dataclasses.replace(config.attention, windows=windows),
    )
    return random_weights(config, dtype=dtype)


def shape_of(config):
    moe = config.moe
    return Shape(config.num_layers, moe.num_experts, moe.top_k)


class Seen(NamedTuple):
    """A layer of one decode step, after a prompt."""

    cache: dict  # of the layer before the step
    x_in_BSD: jax.Array
    hidden_TD: jax.Array | None
    routing: Routing | None
    later: dict[int, Routing]  # what later routers say of this state


@functools.partial(jax.jit, static_argnums=0)
def begin(config, embed_VD, tokens_BS, start_B, valid_BS):
    chunk = make_chunk(config, start_B, valid_BS)
    return embed_tokens(config, embed_VD, tokens_BS), chunk


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_layer(config, kind, flat, experts_ER, x_BSD, chunk, window, cache):
    """A layer: (output, cache, routing), and what a router of this step sees."""
    expert_fn = functools.partial(
        run_experts,
        layout=RecordLayout.of(config),
        activation=config.moe.activation,
        swiglu_limit=config.moe.swiglu_limit,
        method="dense",
    )
    block = bind_block(block_graph(config, kind), flat)
    attended_BSD = hidden_TD = None
    if block.is_moe:
        (attended_BSD, normed_BSD), _ = block.attend(x_BSD, chunk, window, cache)
        hidden_TD, _ = block.route(normed_BSD, chunk)
    out = block(x_BSD, chunk, window, experts_ER, expert_fn, cache)
    return out, attended_BSD, hidden_TD


@functools.partial(jax.jit, static_argnums=(0, 1))
def route_of(config, kind, flat, attended_BSD, chunk):
    """A layer's choice for any state, with its own norm."""
    block = bind_block(block_graph(config, kind), flat)
    return block.route(block.norm_before("mlp", attended_BSD), chunk)[1]


@functools.cache
def decode_step(name="gqa", dtype=np.float32):
    """The layers' `Seen` in the last of some steps, and the chunk; row 1 is padding.

    Token by token, so that every layer and step runs the same few programs.
    """
    weights = model(name, dtype)
    config = weights.config
    rng = np.random.default_rng(3)
    shape = (BATCH, PROMPT + 1)
    tokens_BS = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    caches = [
        kv_cache.empty_cache(config.attention_of(layer), BATCH, CAPACITY)
        for layer in range(config.num_layers)
    ]
    for step in range(PROMPT + 1):
        is_last, seen = step == PROMPT, []
        valid_B1, start_B = np.ones((BATCH, 1), bool), np.full(BATCH, step, np.int32)
        valid_B1[1] = not is_last
        x_BSD, chunk = begin(
            *(config, weights.top["embed"], tokens_BS[:, step : step + 1]),
            *(start_B, valid_B1),
        )
        for layer, flat in enumerate(weights.layers):
            cache, x_in_BSD = caches[layer], x_BSD
            (x_BSD, caches[layer], routing), attended_BSD, hidden_TD = run_layer(
                *(config, config.like(layer), flat, weights.experts[layer]),
                *(x_BSD, chunk, np.int32(layer_window(config, layer)), cache),
            )
            later = {
                i: route_of(
                    *(config, config.like(i), weights.layers[i]), attended_BSD, chunk
                )
                for i in config.moe_layers
                if is_last and routing is not None and i > layer
            }
            seen.append(Seen(cache, x_in_BSD, hidden_TD, routing, later))
    return seen, chunk


def expected_row(routing, config, row=0):
    """Ids that token `row` chose, by score; the only one that is no padding."""
    scores_E = np.asarray(routing.scores_TE)[row]
    if config.moe.scoring == "softmax_topk":
        scores_E = scipy.special.softmax(scores_E)
    ids_K = np.asarray(routing.ids_TK)[row]
    return ids_K, scores_E


def test_the_base_names_nothing():
    nothing = get_predictor("none")
    assert nothing.predict(nothing.init(Shape(2, 4, 1)), 0, 3)[0].shape == (3, 0)


def test_get_predictor_rejects_names_and_options():
    with pytest.raises(ConfigError, match="unknown predictor 'lru'; known: frequency"):
        get_predictor("lru")
    with pytest.raises(ConfigError, match="predictor previous has no option 'decay'"):
        get_predictor("previous", decay=0.5)
    with pytest.raises(ConfigError, match="frequency: decay is 'x', expected a number"):
        get_predictor("frequency", decay="x")
    with pytest.raises(ConfigError, match="stale_gate has no option 'look_ahead'; kn"):
        get_predictor("stale_gate", look_ahead=2)
    with pytest.raises(ConfigError, match="n_layer_gate got no layers; give it in"):
        get_predictor("n_layer_gate", config=ALL["gqa"])


run_scores = jax.jit(scores_ahead, static_argnums=0)


def computed(predictor, state, layer, hidden_TD, ids_TK):
    """The state after an engine's program has computed the scores."""
    gates, moe = predictor.gates_after(layer), predictor.config.moe
    k_T = jnp.where(ids_TK[:, 0] < moe.num_experts, moe.top_k, 0)
    hidden_TD = jnp.asarray(hidden_TD)
    wanted_NE = run_scores(predictor.config, gates, hidden_TD, hidden_TD, k_T)
    return predictor.store(state, layer, wanted_NE)


@pytest.mark.parametrize(
    "name, dtype",
    [
        *slow(("gqa", np.float32), ("gqa", BF16)),
        ("gpt_oss", np.float32),
        *slow(("parts", np.float32)),
    ],
)
def test_n_layer_gate_is_later_routers_on_this_state(name, dtype):
    weights = model(name, dtype)
    config, now = weights.config, decode_step(name, dtype)[0][1]
    predictor = get_predictor(
        "n_layer_gate", config=config, layers=weights.layers, look_ahead=2
    )
    state = predictor.init(shape_of(config))
    ids_TK = np.asarray(now.routing.ids_TK)
    assert (ids_TK[1] == config.moe.num_experts).all(), "a padding row"
    state = computed(predictor, state, 1, now.hidden_TD, ids_TK)
    ids_NM, scores_NM = predictor.predict(state, 1, 4)
    assert ids_NM.shape == (4, config.moe.top_k)
    for row, target in enumerate((2, 3)):
        ids_K, scores_E = expected_row(now.later[target], config)
        assert ids_NM[row].tolist() == ids_K.tolist()
        np.testing.assert_allclose(scores_NM[row], scores_E[ids_K], rtol=2e-5)
    assert (ids_NM[2:] == -1).all(), "the next token's layers are not known yet"
    assert predictor.predict(state, 0, 1)[0].size == 0, "made after another layer"


def test_stale_gate_with_own_norm_reads_the_state_as_it_is():
    weights = model()
    config, now = weights.config, decode_step()[0][2]
    rows = {}
    for norm in ("own", "target"):
        predictor = get_predictor(
            "stale_gate", config=config, layers=weights.layers, norm=norm
        )
        ids_TK = np.asarray(now.routing.ids_TK)
        state = predictor.init(shape_of(config))
        state = computed(predictor, state, 2, now.hidden_TD, ids_TK)
        rows[norm] = predictor.predict(state, 2, 1)
    router_ED = np.asarray(weights.layers[3]["router.weight"])
    logits_E = router_ED @ np.asarray(now.hidden_TD)[0]
    assert rows_of(rows["own"]) == [np.argsort(-logits_E)[:3].tolist()]
    assert not np.allclose(rows["own"][1], rows["target"][1], rtol=1e-3)


def test_gate_predictor_skips_dense_layers_and_the_next_token():
    weights = model(dense_layers=(0, 2))
    predictor = GatePredictor(weights.config, weights.layers, look_ahead=2)
    assert predictor.targets(1) == (3,) and predictor.targets(3) == ()
    assert predictor.gates_after(3) == ()
    state = predictor.init(shape_of(weights.config))
    scores_1E = np.linspace(0, 1, 12, dtype=np.float32)[None]
    assert rows_of(predictor.predict(predictor.store(state, 1, scores_1E), 1, 2)) == [
        [],
        list(range(11, -1, -1)),
    ]


def test_gate_predictor_zero_norm_weight_stays_finite():
    weights = model()
    layers = [dict(flat) for flat in weights.layers]
    layers[1]["mlp_norm"] = layers[1]["mlp_norm"].at[5].set(0.0)
    gate = GatePredictor(weights.config, layers).gates_after(1)[0]
    assert gate["scale"][5] == 0 and np.isfinite(np.asarray(gate["scale"])).all()


@pytest.mark.parametrize("name", ["n_layer_gate", "probe"])
def test_gate_scores_compile_once_for_all_layers(name, tmp_path):
    weights = model()
    config, seen = weights.config, decode_step()[0]
    predictor = GatePredictor(config, weights.layers)
    if name == "probe":
        write_probes(tmp_path, config, 1)
        predictor = get_predictor("probe", config=config, profile=str(tmp_path))
    program = jax.jit(functools.partial(scores_ahead, config))
    for layer in (1, 2):
        k_T = jnp.full(BATCH, config.moe.top_k, jnp.int32)
        hidden_TD = seen[layer].hidden_TD
        out = program(predictor.gates_after(layer), hidden_TD, hidden_TD, k_T)
        assert out.shape == (1, config.moe.num_experts)
    assert program._cache_size() == 1


def write_probes(folder, config, look_ahead, seed=0):
    """Random rows and neurons between all MoE layers, by (layer, target)."""
    shape = config.moe.num_experts, config.d_model + 1
    neurons = 5, 2 * shape[1] + shape[0]
    rng, rows = np.random.default_rng(seed), {}
    (folder / "probes").mkdir()
    info = {"layers": list(config.moe_layers), "E": shape[0], "D": config.d_model}
    (folder / "profile.json").write_text(json.dumps(info))
    for layer in config.moe_layers:
        for target in config.moe_layers:
            if layer < target <= layer + look_ahead:
                rows_EC = rng.standard_normal(shape, np.float32)
                neurons_NX = rng.standard_normal(neurons, np.float32)
                np.save(probe_path(folder, layer, target), rows_EC)
                np.save(neurons_path(folder, layer, target), neurons_NX)
                rows[layer, target] = rows_EC, neurons_NX
    return rows


@pytest.mark.parametrize("family", ["gemma4_text", "llama4_text"])
def test_a_probe_reads_what_the_experts_take(family, tmp_path):
    """As `profile/probes.py` fits it; routers see another state here."""
    weights = random_weights(config_from_hf(raw_config(family)))
    config, layer = weights.config, weights.config.moe_layers[0]
    rows = write_probes(tmp_path, config, 2)
    probe = get_predictor(
        "probe", config=config, profile=str(tmp_path), look_ahead=2
    ).gates_after(layer)
    target = next(each for each in config.moe_layers if each > layer)
    programs = LayerPrograms(config, np.float32)
    start_B, valid_BS = jnp.zeros(1, jnp.int32), jnp.ones((1, 1), bool)
    tokens_BS = jnp.full((1, 1), 7, jnp.int32)
    x_BSD, chunk = begin(config, weights.top["embed"], tokens_BS, start_B, valid_BS)
    cache = kv_cache.empty_cache(config.attention_of(layer), 1, CAPACITY)
    window = jnp.int32(layer_window(config, layer))
    given = x_BSD, weights.layers[layer], probe, chunk, window, cache
    routed, _ = programs.attend(programs.kinds[layer], *given)
    values_E = values_of(*rows[layer, target], np.asarray(routed.hidden_TD))[0]
    wanted_E = np.asarray(routed.wanted_NE)[0]
    best_K = np.argsort(-values_E)[: config.moe.top_k]
    assert set(np.flatnonzero(wanted_E >= 0)) == set(best_K)
    np.testing.assert_allclose(
        wanted_E[best_K], np.logaddexp(0, values_E[best_K]), rtol=1e-4
    )


@pytest.mark.parametrize("name", ["gqa", "gpt_oss"])
def test_probe_names_what_its_rows_say(name, tmp_path):
    config, now = model(name).config, decode_step(name)[0][1]
    rows = write_probes(tmp_path, config, 2)
    given = {"config": config, "profile": str(tmp_path), "look_ahead": 2}
    predictor = get_predictor("probe", **given)
    state = predictor.init(shape_of(config))
    ids_TK = np.asarray(now.routing.ids_TK)
    state = computed(predictor, state, 1, now.hidden_TD, ids_TK)
    ids_NM, scores_NM = predictor.predict(state, 1, 3)
    hidden_D = np.asarray(now.hidden_TD)[0]  # the other row is padding
    for row, target in enumerate((2, 3)):
        values_E = values_of(*rows[1, target], hidden_D[None])[0]
        ids_K = np.argsort(-values_E)[: config.moe.top_k]
        assert ids_NM[row].tolist() == ids_K.tolist()
        scores_K = np.logaddexp(0, values_E[ids_K])
        np.testing.assert_allclose(scores_NM[row], scores_K, rtol=1e-4)
    assert (ids_NM[2] == -1).all(), "the next token's layers are not known yet"


def test_probe_refuses_profiles_that_do_not_fit(tmp_path):
    config = model().config
    given = {"config": config, "profile": str(tmp_path)}
    with pytest.raises(CheckpointError, match="is no profile of moe-edge profile"):
        get_predictor("probe", **given)
    write_probes(tmp_path, config, 1)
    (tmp_path / "probes").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="has no probes; run .* with --probes 1"):
        get_predictor("probe", **given)
    (tmp_path / "away").rename(tmp_path / "probes")
    other = dataclasses.replace(config, d_model=2 * config.d_model)
    with pytest.raises(CheckpointError, match="is of a model with .* this one has"):
        get_predictor("probe", **given | {"config": other})
    with pytest.raises(CheckpointError, match=r"001_003.npy cannot be .* --probes 2"):
        get_predictor("probe", **given, look_ahead=2)
    neurons = neurons_path(tmp_path, 1, 2)
    right = np.load(neurons)
    for wrong, words in (
        (right[:3], r"have \[3, 5\] neurons, expected one number"),
        (right[:, :-1], r"expected float32 \(any number, "),
        (np.float32(1), r"holds float32 \(\), expected"),
        (right[:0], r"holds float32 \(0, .*\), expected"),
        (np.nan * right, "holds values that are not finite"),
    ):
        np.save(neurons, wrong)
        with pytest.raises(CheckpointError, match=words):
            get_predictor("probe", **given)
    neurons.unlink()
    with pytest.raises(CheckpointError, match=r"002_neurons.npy cannot be .* --probes"):
        get_predictor("probe", **given)
    np.save(probe_path(tmp_path, 1, 2), np.zeros((3, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"holds float32 \(3, 3\), expected"):
        get_predictor("probe", **given)


def test_gate_predictor_rejects_norm_and_look_ahead():
    with pytest.raises(ConfigError, match="norm of a stale gate 'next'; known: own, t"):
        GatePredictor(ALL["gqa"], (), norm="next")
    with pytest.raises(ConfigError, match="look_ahead must be .* got 0"):
        GatePredictor(ALL["gqa"], (), look_ahead=0)


def test_wanted_scores_top_score_rule_by_hand():
    moe = dataclasses.replace(ALL["gqa"].moe, num_experts=5, top_k=2)
    scores_TE = jnp.array(
        [
            [0.40, 0.30, 0.20, 0.06, 0.04],  # s = 0.2
            [0.05, 0.31, 0.34, 0.30, 0.00],  # s = 0.3
            [0.90, 0.02, 0.02, 0.03, 0.03],  # padding
        ]
    )
    ids_TK = jnp.array([[0, 1], [2, 1], [5, 5]])

    def wanted(top_a):
        return np.asarray(wanted_scores(ids_TK, scores_TE, moe, top_a))

    expected = np.array([0.40, 0.31, 0.34, -1, -1], np.float32)
    np.testing.assert_array_equal(wanted(None), expected)
    np.testing.assert_array_equal(wanted(0.0), expected)
    # At a = 0.1 the first token keeps both, the second only expert 2: expert 1's
    # score is now the first token's.
    expected[1] = 0.30
    np.testing.assert_array_equal(wanted(0.1), expected)
    expected[1:3] = -1
    np.testing.assert_array_equal(wanted(0.9), expected)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_partial_gate(config, kind, flat, x_BSD, chunk, window, cache):
    block = bind_block(block_graph(config, kind), flat)
    return partial_gate(block, x_BSD, chunk, window, cache, None)[0]


@pytest.mark.parametrize("name", slow_but(["gqa", "mla_bias"], ALL))
def test_partial_gate_of_the_full_state_is_the_next_layers_choice(name):
    weights = model(name)
    config, (seen, chunk) = weights.config, decode_step(name)
    compiled = run_partial_gate._cache_size()
    predictor = DevicePredictor()
    for layer in (1, 2):
        then = seen[layer + 1]
        before = {k: np.array(v) for k, v in then.cache.items()}
        window = jnp.int32(layer_window(config, layer + 1))
        what = config, config.like(layer + 1), weights.layers[layer + 1]
        wanted_E = run_partial_gate(*what, then.x_in_BSD, chunk, window, then.cache)
        ids_K, scores_E = expected_row(then.routing, config)
        state = predictor.store(predictor.init(shape_of(config)), layer, wanted_E[None])
        ids_NM, scores_NM = predictor.predict(state, layer, 1)
        assert ids_NM.tolist() == [ids_K.tolist()]
        np.testing.assert_allclose(scores_NM[0], scores_E[ids_K], rtol=1e-4)
        for key, array in then.cache.items():
            np.testing.assert_array_equal(np.asarray(array), before[key])
        partial_BSD = np.asarray(then.x_in_BSD)
        partial_BSD = jnp.asarray(partial_BSD + 0.5 * np.roll(partial_BSD, 1, axis=-1))
        other_E = run_partial_gate(*what, partial_BSD, chunk, window, then.cache)
        assert not np.allclose(other_E, wanted_E)
    kinds = {config.like(layer) for layer in (2, 3)}
    assert run_partial_gate._cache_size() == compiled + len(kinds)


def test_partial_gate_reads_the_cache():
    weights = model()
    config, (seen, chunk) = weights.config, decode_step()
    then, window = seen[2], jnp.int32(layer_window(config, 2))
    empty = {name: np.zeros(a.shape, a.dtype) for name, a in then.cache.items()}
    full_E, without_E = (
        run_partial_gate(
            *(config, config.like(2), weights.layers[2]),
            *(then.x_in_BSD, chunk, window, cache),
        )
        for cache in (then.cache, empty)
    )
    assert not np.allclose(full_E, without_E)
