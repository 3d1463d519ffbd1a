import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.core.checks import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
)
from moe_edge.engine import session as sessions
from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sizes import bucket
from moe_edge.engine.weights import load_weights
from moe_edge.kernels import grouped
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.model.sampling import Sampling
from moe_edge.model.transformer import Transformer
from tests.support.slow_cases import slow, slow_but
from tests.support.tiny_models import (
    ALL,
    BF16,
    GQA,
    RandomReader,
    random_prompts,
    random_weights,
    score_all,
)

# Three rows in chunks of 16 or, with ten more tokens, 48, and in capacities of 64.
SHORT, LENGTHS = (5, 9, 5), (38, 3, 33)


@functools.cache
def engine_of(name="gqa", dtype=np.float32):
    """Engines are shared: most of a test's time is compilation."""
    return ResidentEngine(random_weights(ALL[name], dtype=dtype))


def greedy(engine, prompts, new=8, **kwargs):
    return generate(engine, prompts, new, **kwargs).tokens


def assert_close(ours, reference, tolerance=1e-5):
    """Gate B of the identity gates: relative to the logits' spread."""
    difference = np.abs(ours - reference).max() / reference.std()
    assert difference <= tolerance


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("gqa", BF16),
        ("mla", np.float32),
        ("gpt_oss", np.float32),
        ("parts", np.float32),
    ],
)
def test_decode_matches_teacher_forced_prefill(name, dtype):
    engine = engine_of(name, dtype)
    prompts = random_prompts(ALL[name], LENGTHS)
    session = engine.new_session(len(prompts), 60)
    step_logits = [engine.prefill(session, prompts)]
    forced = random_prompts(ALL[name], [10] * len(prompts), seed=1)
    active = jax.device_put(np.ones(len(prompts), bool))
    for step in range(10):
        tokens = jax.device_put(np.asarray([row[step] for row in forced], np.int32))
        step_logits.append(engine.decode(session, tokens, active))
    decoded = np.stack([np.asarray(logits) for logits in step_logits], axis=1)
    full = [prompt + row for prompt, row in zip(prompts, forced, strict=True)]
    # On a GPU few rows are rounded to bfloat16 and many are not (`kernels/grouped.py`):
    # .013, and .07 where a near tie then chooses another expert (test_as_on_a_gpu.py).
    is_split = dtype == BF16 and jax.default_backend() == "gpu"
    is_rounded = is_split and grouped.num_parts() < 3
    tolerance = 0.1 if is_rounded else 1e-5
    for row, logits in enumerate(score_all(engine, full)):
        assert_close(decoded[row], logits[len(prompts[row]) - 1 :], tolerance)


@pytest.mark.parametrize("name", slow_but(["mla_bias", "gqa", "q4_0"], ALL))
def test_engine_matches_plain_transformer(name):
    config = ALL[name]
    reader = RandomReader(config)
    engine = engine_of(name)
    prompts = random_prompts(config, LENGTHS)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    flat = dict(engine.weights.top)
    for layer, dense in enumerate(engine.weights.layers):
        flat |= {f"blocks.{layer}.{name}": array for name, array in dense.items()}
    state = [
        (tuple(int(p) if p.isdigit() else p for p in name.split(".")), nnx.Param(array))
        for name, array in flat.items()
    ]
    nnx.update(model, nnx.from_flat_state(state))
    experts = [
        jnp.asarray(reader.experts(layer)) if layer in config.moe_layers else None
        for layer in range(config.num_layers)
    ]
    moe = config.moe
    dense_loop = functools.partial(
        run_experts,
        layout=RecordLayout.of(config),
        activation=moe.activation,
        swiglu_limit=moe.swiglu_limit,
        method="dense",
    )
    run = jax.jit(lambda ids_BS: model(ids_BS, experts, dense_loop)[0])
    logits = run(np.array(prompts[:1]))
    assert_close(score_all(engine, prompts)[0], np.asarray(logits)[0])


def test_unequal_prompts_match_each_alone():
    engine = engine_of()
    prompts = random_prompts(GQA, LENGTHS)
    together = greedy(engine, prompts)
    assert together == [greedy(engine, [prompt])[0] for prompt in prompts]


def test_chunked_prefill_matches_one_chunk(monkeypatch):
    engine = engine_of()
    prompts = random_prompts(GQA, LENGTHS)
    whole = score_all(engine, prompts)
    monkeypatch.setattr(sessions, "PREFILL_CHUNK", 16)
    for ours, reference in zip(score_all(engine, prompts), whole, strict=True):
        assert_close(ours, reference)
    session = engine.new_session(len(prompts), 60)
    last = np.asarray(engine.prefill(session, prompts))
    for row, reference in enumerate(whole):
        assert_close(last[row], reference[-1])


def test_grouped_layers_match_single_layers():
    prompts = random_prompts(GQA, LENGTHS)
    alone = score_all(engine_of(), prompts)
    engine = ResidentEngine(engine_of().weights, layers_per_program=2)  # 2 and 1
    grouped = score_all(engine, prompts)
    for ours, reference in zip(grouped, alone, strict=True):
        assert_close(ours, reference)


@pytest.mark.parametrize("dtype", [*slow(np.float32), BF16])
@pytest.mark.parametrize("name", ["gqa", *slow("mla"), "gpt_oss"])
def test_a_step_in_one_program_has_the_bits_of_one_in_several(name, dtype):
    whole, prompts = engine_of(name, dtype), random_prompts(ALL[name], SHORT)
    parts = ResidentEngine(whole.weights, layers_per_program=1)
    active_B = jnp.asarray([True, False, True])
    found = []
    for engine in (whole, parts):
        session = engine.new_session(3, 60)
        if name == "gqa":
            session.k_B = jnp.asarray([2, 1, 3], np.int32)
        values = [engine.prefill(session, prompts)]
        for token in range(5):
            tokens_B, routings = jnp.asarray([token, 7, 9 - token]), {}
            logits = engine.decode(
                session, tokens_B, active_B, on_routing=routings.__setitem__
            )
            assert list(routings) == list(ALL[name].moe_layers)
            values += [logits, *jax.tree.leaves(routings)]
        caches = [array for cache in session.caches for array in cache.values()]
        found.append([*values, *caches, session.positions_B])
    for one, several in zip(*found, strict=True):
        np.testing.assert_array_equal(one, several)


def test_decode_compiles_once_and_moves_nothing_implicitly():
    engine = engine_of()
    session = engine.new_session(3, 60)
    engine.prefill(session, random_prompts(GQA, SHORT))
    tokens = jax.device_put(np.asarray([1, 2, 3], np.int32))
    active = jax.device_put(np.ones(3, bool))
    engine.decode(session, tokens, active)
    compiled = engine.num_compiled()
    with jax.transfer_guard("disallow"):
        for _ in range(40):
            engine.decode(session, tokens, active)
    assert engine.num_compiled() == compiled


def test_decode_writes_cache_in_place():
    engine = engine_of()
    session = engine.new_session(1, 60)
    engine.prefill(session, [[1, 2, 3]])
    tokens, active = jnp.asarray([1]), jnp.asarray([True])
    pointer = session.caches[1]["k"].unsafe_buffer_pointer()
    for _ in range(3):
        engine.decode(session, tokens, active)
    assert session.caches[1]["k"].unsafe_buffer_pointer() == pointer


def test_on_routing_sees_every_layer_and_no_padding():
    engine = engine_of()
    seen = []
    greedy(
        engine,
        random_prompts(GQA, SHORT),
        new=2,
        on_routing=lambda layer, routing: seen.append((layer, routing)),
    )
    assert [layer for layer, _ in seen] == [1, 2, 1, 2]
    prefill_ids = np.asarray(seen[0][1].ids_TK)
    E, K = GQA.moe.num_experts, GQA.moe.top_k
    assert (prefill_ids < E).sum() == sum(SHORT) * K


def test_generate_stop_token_ends_row_and_is_kept():
    engine = engine_of()
    prompts = random_prompts(GQA, SHORT)
    free = greedy(engine, prompts, new=8)
    stop = free[0][2]
    stopped = greedy(engine, prompts, new=8, stop_ids=[stop])
    for row, reference in zip(stopped, free, strict=True):
        end = reference.index(stop) + 1 if stop in reference else 8
        assert row == reference[:end]


def test_a_step_ahead_changes_no_token_and_nobody_is_told_its_routing():
    engine, prompts = engine_of(), random_prompts(GQA, SHORT[:2])
    wanted = generate(engine, prompts, 12).tokens
    stops = sorted({wanted[0][4], wanted[1][7]})
    told, steps = [], []
    decode = engine.decode

    def counted(*given):
        steps.append(given)
        return decode(*given)

    engine.decode = counted
    ahead = generate(engine, prompts, 12, stop_ids=stops)
    longest = max(map(len, ahead.tokens))
    assert longest < 12 and len(steps) == longest  # the last one was in vain
    steps.clear()
    alone = generate(
        engine, prompts, 12, stop_ids=stops, on_routing=lambda *one: told.append(one)
    )
    assert alone.tokens == ahead.tokens
    assert len(steps) == longest - 1
    assert len(told) == (1 + len(steps)) * len(GQA.moe_layers)
    steps.clear()
    assert generate(engine, prompts, 12).tokens == wanted and len(steps) == 11


def test_generate_streams_tokens_in_order():
    engine = engine_of()
    got = [[], [], []]
    result = generate(
        engine,
        random_prompts(GQA, SHORT),
        6,
        sampling=Sampling(temperature=1.0, seed=3),
        on_token=lambda row, token: got[row].append(token),
    )
    assert got == result.tokens
    assert result.steps == 5


def test_generate_same_seed_repeats_and_other_differs():
    engine = engine_of()
    prompts = random_prompts(GQA, (9,))
    draws = [
        greedy(engine, prompts, new=16, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_bucket_holds_size_and_wastes_little():
    for size in range(1, 3000):
        assert size <= bucket(size) <= max(16, 1.5 * size)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 61]], "token id 61, expected 0..60"),
        ([[-1]], "token id -1"),
    ],
)
def test_generate_rejects_bad_prompts(prompts, message):
    engine = engine_of()
    with pytest.raises(RequestError, match=message):
        generate(engine, prompts, 2)


def test_generate_rejects_prompt_beyond_context():
    engine = engine_of()
    with pytest.raises(CapacityError, match="2050 tokens .* context of 2048"):
        generate(engine, random_prompts(GQA, [2040]), 10)


def test_load_weights_rejects_missing_extra_and_misshapen():
    class Broken(RandomReader):
        def dense_layer(self, layer):
            arrays = super().dense_layer(layer)
            return self.spoil(arrays) if layer == 1 else arrays

    reader = Broken(GQA)
    reader.spoil = lambda arrays: {k: v for k, v in arrays.items() if k != "attn.q"}
    with pytest.raises(CheckpointError, match="layer 1 .* missing attn.q;"):
        load_weights(reader)
    reader.spoil = lambda arrays: arrays | {"attn.z": arrays["attn.q"]}
    with pytest.raises(CheckpointError, match="layer 1 .* unexpected attn.z;"):
        load_weights(reader)
    reader.spoil = lambda arrays: arrays | {"attn.q": arrays["attn.q"][:, :3]}
    with pytest.raises(CheckpointError, match=r"attn.q has shape \(48, 3\)"):
        load_weights(reader)


def test_session_beyond_the_context_is_refused_with_the_reason():
    weights = random_weights(GQA)
    config = dataclasses.replace(GQA, max_positions=64, positions_end="why it ends")
    engine = ResidentEngine(dataclasses.replace(weights, config=config))
    with pytest.raises(CapacityError, match=r"65 .* context of 64 \(why it ends\);"):
        engine.new_session(1, 65)


def test_decode_beyond_capacity_is_refused():
    engine = engine_of()
    session = engine.new_session(1, 60)
    engine.prefill(session, [[1, 2, 3]])
    tokens, active = jnp.asarray([1]), jnp.asarray([True])
    for _ in range(session.capacity - 3):
        engine.decode(session, tokens, active)
    with pytest.raises(CapacityError, match="64 tokens and 1 more exceed .* of 64"):
        engine.decode(session, tokens, active)


def test_prefill_of_a_used_session_is_refused():
    engine = engine_of()
    session = engine.new_session(1, 60)
    engine.prefill(session, [[1, 2, 3]])
    with pytest.raises(CapacityError, match="fresh session"):
        engine.prefill(session, [[1, 2, 3]])


@pytest.mark.parametrize("value", [0, 2.5, True])
def test_generate_rejects_bad_max_new_tokens(value):
    with pytest.raises(ConfigError, match=f"max_new_tokens must be .* got {value}"):
        generate(engine_of(), [[1]], value)


def test_load_weights_refuses_nan_by_name_when_asked():
    class Broken(RandomReader):
        def dense_layer(self, layer):
            arrays = super().dense_layer(layer)
            if layer == 1:
                arrays["attn.q"][3, 2] = np.nan
            return arrays

    load_weights(Broken(GQA))
    with pytest.raises(CheckpointError, match="layer 1: attn.q has NaN or infinite"):
        load_weights(Broken(GQA), check_finite=True)


def test_sampled_rows_do_not_depend_on_their_batch():
    engine = engine_of()
    prompts = random_prompts(GQA, SHORT)
    sampling = Sampling(temperature=1.0, seed=4)
    together = generate(engine, prompts, 12, sampling=sampling).tokens
    second = generate(engine, prompts[1:2], 12, sampling=sampling, row_ids=[1]).tokens
    assert second == together[1:2]


def test_equal_prompts_draw_different_samples():
    sampling = Sampling(temperature=1.0)
    rows = generate(engine_of(), [[1, 2, 3]] * 3, 12, sampling=sampling).tokens
    assert len({tuple(row) for row in rows}) == 3
