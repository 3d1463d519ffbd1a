"""A shadow follows a running model: what it holds, how it is aligned, what it names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.session import cache_bytes
from moe_edge.model import kv_cache
from moe_edge.model.packed import Packed
from moe_edge.model.record import RecordLayout
from moe_edge.papers.od_moe.shadow.engine import make_shadow
from moe_edge.papers.od_moe.shadow.follower import Course, Follower, read_choices
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.shadow.recall import recall
from tests.support.layered import (
    CAPACITY,
    NINE,
    THREE,
    StoreReader,
    assert_same_bits,
    layered,
    resident_of,
)
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

STEPS = 12
ONE, BATCH = ("gqa", BF16, NINE), ("gqa", np.float32, THREE)  # compiled once for all
MLA_ONE, GPT_OSS_ONE = ("mla", np.float32, NINE), ("gpt_oss", BF16, NINE)


@functools.cache
def shadow_of(name, dtype, precision):
    return make_shadow(resident_of(name, dtype).weights, precision)


def run_beside(name, dtype, lengths, precision, periods, steps=STEPS):
    """(actual, predicted) of a run with random tokens: int `[steps * B, L, K]`."""
    engine, shadow = resident_of(name, dtype), shadow_of(name, dtype, precision)
    prompts, batch = random_prompts(engine.config, lengths), len(lengths)
    forced = random_prompts(engine.config, [steps] * batch, seed=1)
    session = engine.new_session(batch, CAPACITY)
    engine.prefill(session, prompts)
    course = Course(Follower(shadow, batch, CAPACITY), periods)
    course.begin(prompts)
    K, active_B = engine.config.moe.top_k, jnp.ones(batch, bool)
    actual, predicted = [], []
    for step in range(steps):
        tokens_B = jax.device_put(np.array([row[step] for row in forced], np.int32))
        choices = course.step(session.caches, tokens_B, active_B)
        predicted.append(read_choices(choices, batch, K))
        found = [None] * engine.config.num_layers
        engine.decode(
            session,
            tokens_B,
            active_B,
            lambda layer, routing, found=found: found.__setitem__(
                layer, routing.ids_TK
            ),
        )
        actual.append(read_choices(found, batch, K))
    return tuple(
        np.stack(rows).swapaxes(1, 2).reshape(-1, *rows[0].shape[::2])
        for rows in (actual, predicted)
    )


@pytest.mark.parametrize(
    "name, dtype, lengths", [*slow(ONE), BATCH, MLA_ONE, *slow(GPT_OSS_ONE)]
)
def test_full_shadow_aligned_at_every_step_chooses_what_the_model_chooses(
    name, dtype, lengths
):
    actual, predicted = run_beside(name, dtype, lengths, "full", Shadow("full"))
    np.testing.assert_array_equal(actual, predicted)
    assert recall(actual, predicted) == 1.0
    assert (actual >= 0).sum() == STEPS * len(lengths) * 2 * ALL[name].moe.top_k


@pytest.mark.parametrize(
    "periods", [(1, 0), (3, 4), (0, 1), (0, 0)], ids="T{0[0]}_KV{0[1]}".format
)
def test_unaligned_tokens_end_the_agreement_and_unaligned_keys_do_not(periods):
    # The model's tokens are random here: only an aligned shadow can know them.
    actual, predicted = run_beside(*ONE, "full", Shadow("full", *periods))
    equal = (actual == predicted).all(axis=(1, 2))
    if periods[0] == 1:
        assert equal.all()
    else:
        token_is_known = [
            Shadow("full", *periods).aligns_token(i + 1) for i in range(12)
        ]
        assert equal[0] == token_is_known[0]
        assert not equal[1:3].any()
    if periods[0] == 3:
        # Steps 1 and 13 would have both; at 4, 7, 10 keys are the shadow's own in part.
        assert equal[[0]].all() and not equal[[4, 5, 7, 8]].any()


def test_alignment_of_keys_replaces_just_the_positions_since_the_last():
    engine, shadow = resident_of(*BATCH[:2]), shadow_of(*BATCH[:2], "int8")
    prompts = random_prompts(GQA, THREE)
    session = engine.new_session(3, CAPACITY)
    engine.prefill(session, prompts)
    follower = Follower(shadow, 3, CAPACITY)
    course = Course(follower, Shadow("int8", 1, 2))
    course.begin(prompts)
    tokens_B, active_B = jnp.array([1, 2, 3], jnp.int32), jnp.ones(3, bool)
    lengths = np.array(THREE)

    def differs(positions):
        """Whether the rows' keys of a position differ, in the last layer."""
        start_B = jnp.array(positions, jnp.int32)
        found = [
            np.asarray(kv_cache.read(caches[2]["k"], start_B, 1))
            for caches in (session.caches, follower.session.caches)
        ]
        return (found[0] != found[1]).any()

    for step in range(3):
        course.step(session.caches, tokens_B, active_B)
        assert not differs(lengths - 1)  # of the prompt: aligned at step 1
        engine.decode(session, tokens_B, active_B)
        assert differs(lengths + step)  # its own
        if step == 2:
            assert not differs(lengths) and not differs(lengths + 1)
        else:
            assert differs(lengths)


def test_keys_by_message_equal_keys_by_copy():
    engine, shadow = resident_of(*MLA_ONE[:2]), shadow_of(*MLA_ONE[:2], "int8")
    prompts = random_prompts(engine.config, NINE)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, prompts)
    tokens_B, active_B = jnp.array([5], jnp.int32), jnp.ones(1, bool)
    chosen = []
    for by_message in (False, True):
        follower = Follower(shadow, 1, CAPACITY)
        follower.begin(NINE)
        if by_message:
            zero_B = jnp.zeros(1, jnp.int32)
            kv = shadow.programs.read_kv(session.caches, zero_B, count=NINE[0])
            layers = engine.config.num_layers
            assert [each.shape for each in kv] == [(layers, 1, NINE[0], 16)]
            follower.align_kv(jax.device_get(kv), zero_B)  # as it would travel
        else:
            follower.copy_all_kv(session.caches)
        chosen.append(read_choices(follower.step(active_B, tokens_B), 1, 3))
    np.testing.assert_array_equal(*chosen)


@pytest.mark.parametrize(
    "model, precision",
    [
        *slow((ONE, "fp16"), (ONE, "nf4")),
        (MLA_ONE, "int8"),
        *slow((GPT_OSS_ONE, "bf16")),
        *slow((("parts", np.float32, NINE), "fp16")),
    ],
)
def test_lower_precisions_name_most_of_the_experts(model, precision):
    actual, predicted = run_beside(*model, precision, Shadow(precision))
    least = {"fp16": 0.98, "bf16": 0.95, "int8": 0.93, "nf4": 0.7}[precision]
    assert recall(actual, predicted) >= least
    assert (predicted[:, 0] == -1).all()  # the dense layer


@pytest.mark.parametrize("precision, dense", [("int8", "Int8"), ("nf4", "Int8")])
def test_what_decides_most_stays_as_stored(precision, dense):
    model, shadow = resident_of(*ONE[:2]), shadow_of(*ONE[:2], precision)
    flat, packed = model.weights.layers[1], shadow.weights.layers[1]
    kept = {name for name, value in packed.items() if not isinstance(value, Packed)}
    assert kept == {
        *("attn_norm", "mlp_norm", "attn.q_bias", "attn.k_bias", "attn.v_bias"),
        *("router.weight", "shared_gate", "shared.gate", "shared.up", "shared.down"),
    }
    assert all(packed[name] is flat[name] for name in kept)
    assert {type(packed[n]).__name__ for n in packed if n not in kept} == {dense}
    assert type(shadow.weights.top["head"]).__name__ == dense
    assert shadow.weights.top["embed"] is model.weights.top["embed"]


def test_shadow_of_the_model_itself_shares_its_weights():
    shadow, weights = shadow_of(*ONE[:2], "full"), resident_of(*ONE[:2]).weights
    assert shadow.weights.experts[1] is weights.experts[1]


# As a predictor of the layered engine.

SHADOW = {"predictor": "shadow"}


def shadowed(name="gqa", dtype=BF16, slots=9, **options):
    return layered(name, dtype, slots, horizon=3, **SHADOW, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "full"},
        {"precision": "nf4", "token_period": 2, "kv_period": 3},
        {"precision": "full", "token_period": 0, "kv_period": 0},
    ],
)
def test_logits_equal_resident_and_experts_were_prefetched(options):
    engine = shadowed(predictor_options=options)
    assert_same_bits(engine, *ONE)
    stats = engine.queue.stats()
    assert stats.prefetch.count > 20
    accuracy = engine.predictor_run.accuracy
    # The first MoE layer stands two after the token's begin, the second one after it.
    assert accuracy.rounds_LA[[1, 2], [1, 0]].tolist() == [64, 64]
    found = accuracy.recall_LA[[1, 2], [1, 0]].min()
    if options == {"precision": "full"}:
        assert found == 1.0
        counters = engine.layer_step.counters[True]
        assert stats.demand.count < counters.hits  # most were there in time
    elif options.get("token_period", 1) == 1:
        assert found > 0.9
    report = engine.report()
    assert report["shadow_bytes"] > 0 and report["predictor"] == "shadow"


def test_logits_of_a_batch_equal_resident():
    engine = shadowed(*BATCH[:2], slots=12)
    assert_same_bits(engine, *BATCH)
    assert engine.queue.stats().prefetch.count > 10
    accuracy = engine.predictor_run.accuracy
    assert accuracy.recall_LA[[1, 2], [1, 0]].min() > 0.9


@pytest.mark.parametrize("token_period, kv_period", [(1, 1), (1, 3), (3, 0)])
def test_first_step_compiles_all_that_later_ones_run(token_period, kv_period):
    periods = {"token_period": token_period, "kv_period": kv_period}
    engine = shadowed(predictor_options={"precision": "full"} | periods)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, random_prompts(GQA, NINE))
    for step in range(5):
        engine.decode(session, jnp.array([step], jnp.int32), jnp.ones(1, bool))
        if step == 0:
            compiled = engine.num_compiled()
    assert engine.num_compiled() == compiled


def test_sessions_may_take_turns_and_compile_nothing_more():
    engine = shadowed(predictor_options={"precision": "full"})
    prompts = random_prompts(GQA, (9, 9))
    sessions = [engine.new_session(1, CAPACITY) for _ in prompts]
    active_B = jnp.ones(1, bool)
    for session, prompt in zip(sessions, prompts, strict=True):
        engine.prefill(session, [prompt])
    for step in range(6):
        if step == 1:
            compiled = engine.num_compiled()
        for session in sessions:
            engine.decode(session, jnp.array([step], jnp.int32), active_B)
    assert engine.num_compiled() == compiled
    assert engine.predictor_run.accuracy.recall_LA[[1, 2], [1, 0]].tolist() == [
        1.0,
        1.0,
    ]
    assert len(engine.shadow._courses) == 2
    del sessions, session
    assert len(engine.shadow._courses) == 0


def test_shadow_follows_to_another_operating_point():
    engine = shadowed(with_trace=False, predictor_options={"precision": "full"})
    point = engine.at_k(2)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, random_prompts(GQA, NINE))
    for step, which in enumerate((engine, point, engine, point)):
        which.decode(session, jnp.array([step], jnp.int32), jnp.ones(1, bool))
    accuracy = engine.predictor_run.accuracy
    assert accuracy.recall_LA[[1, 2], [1, 0]].tolist() == [1.0, 1.0]
    assert accuracy.predicted_LA[2, 0] == 3 + 2 + 3 + 2


def test_absolute_budget_counts_the_shadow_and_its_cache():
    model, shadow = resident_of(*ONE[:2]), shadow_of(*ONE[:2], "int8")
    dense = jax.tree.leaves((model.weights.top, model.weights.layers))
    block_bytes = 2 * RecordLayout.of(GQA).size
    other_bytes = sum(array.nbytes for array in dense) + 2 * cache_bytes(GQA, 1, 64)
    total_bytes = other_bytes + shadow.weights.num_bytes + 5 * block_bytes
    options = OffloadOptions(device_memory=f"{total_bytes / 2**20}MiB", **SHADOW)
    with make_offloaded(StoreReader(GQA, dtype=BF16), options, capacity=64) as engine:
        assert engine.cache.spec.num_slots == 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"predictor_options": {"precision": "fp8"}}, "shadow precision 'fp8'; known"),
        ({"predictor_options": {"kv_period": -2}}, "kv_period must be .*, got -2"),
        ({"mode": "fused"}, "mode fused has no predictor"),
        ({"eviction": "on_demand"}, "predictor shadow has nowhere to put a block"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(change, message):
    with pytest.raises(ConfigError, match=message):
        OffloadOptions(predictor="shadow", **change)


def test_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="shadow precision 'q3'; known: .*full"):
        make_shadow(resident_of(*ONE[:2]).weights, "q3")
