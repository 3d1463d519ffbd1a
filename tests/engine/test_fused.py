"""The fused engine computes the resident engine's bits at any number of slots."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import programs
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.generate import generate
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.lookup_runs import cut_runs
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.store import pin_records
from moe_edge.route.base import gate_scores, get_route
from tests.support.layered import CAPACITY, resident_of
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

STEPS = 64
NINE, THREE = (9,), (20, 3, 33)
BITS = ("gqa", BF16, NINE)  # its prefill runs `pairs`, which compile fast
RECORDS = "moe_infinity"  # a policy that keeps a record of each session


def weights_of(name, dtype):
    return resident_of(name, dtype).weights


def spec_of(config, slots, pool=False):
    """`slots` for each MoE layer, in one pool or the layer's own."""
    layer_S = [layer for layer in config.moe_layers for _ in range(slots)]
    layer_S = [-1] * len(layer_S) if pool else layer_S
    moe = config.moe
    return CacheSpec(config.num_layers, moe.num_experts, moe.top_k, tuple(layer_S))


def fused_of(weights, slots, policy="lru", pool=False, **options):
    hosts = [
        None if records is None else pin_records(records) for records in weights.experts
    ]
    # Without the resident copies: what is not in a slot can only come from the host.
    weights = dataclasses.replace(weights, experts=(None,) * len(hosts))
    spec = spec_of(weights.config, slots, pool)
    return FusedEngine(weights, hosts, spec, get_eviction(policy), **options)


def greedy_logits(engine, prompts, steps=STEPS, after_prefill=None, on_routing=None):
    """Logits `[1 + steps, B, V]` of prefill and greedy steps, one row ended early."""
    session = engine.new_session(len(prompts), CAPACITY)
    out = [np.asarray(engine.prefill(session, prompts))]
    if after_prefill is not None:
        after_prefill()
    active = np.ones(len(prompts), bool)
    for step in range(steps):
        if step == steps // 2 and len(prompts) > 1:
            active[1] = False
        tokens = jax.device_put(out[-1].argmax(-1).astype(np.int32))
        active_B = jax.device_put(active.copy())
        out.append(np.asarray(engine.decode(session, tokens, active_B, on_routing)))
    return np.stack(out)


@functools.cache
def resident_logits(name, dtype, lengths):
    return greedy_logits(resident_of(name, dtype), random_prompts(ALL[name], lengths))


@functools.cache
def shared_engine(name, dtype, slots, policy):
    """Most of a test's time is compilation."""
    return fused_of(weights_of(name, dtype), slots, policy)


@pytest.mark.slow
def test_programs_of_some_layers_have_the_bits_of_one():
    """As a deep model has on a CPU."""
    name, dtype, lengths = BITS
    weights, told = weights_of(name, dtype), []
    engine = fused_of(weights, 9, layers_per_program=2)  # of 3: 2 and 1
    prompts = random_prompts(ALL[name], lengths)

    def tell(layer, routing):
        told.append(layer)

    got = greedy_logits(engine, prompts, 8, on_routing=tell)
    np.testing.assert_array_equal(got, resident_logits(*BITS)[:9])
    assert told == [*weights.config.moe_layers] * 8  # of steps
    whole = fused_of(weights, 9)
    greedy_logits(whole, prompts, 8)
    for counted, expected in zip(engine.counts(), whole.counts(), strict=True):
        np.testing.assert_array_equal(counted, expected)
    compiled = engine.num_compiled()
    greedy_logits(engine, prompts, 2)
    assert engine.num_compiled() == compiled


@pytest.mark.parametrize(
    "name, dtype, lengths, slots, policy",
    [
        *slow((*BITS, 4, RECORDS)),
        ("mla", np.float32, NINE, 5, "smoe_score"),
        *slow(("parts", np.float32, NINE, 5, "lru")),
    ],
)
def test_logits_equal_resident_and_counters_a_replay(
    name, dtype, lengths, slots, policy
):
    config, seen = ALL[name], []
    engine = shared_engine(name, dtype, slots, policy)
    logits = greedy_logits(
        engine,
        random_prompts(config, lengths),
        after_prefill=engine.clear,
        on_routing=lambda layer, routing: seen.append((layer, routing)),
    )
    np.testing.assert_array_equal(logits, resident_logits(name, dtype, lengths))

    cache = SlotCache(spec_of(config, slots), get_eviction(policy))
    hits_L, misses_L = np.zeros((2, config.num_layers), int)
    for place, (layer, routing) in enumerate(seen):
        scores_TE = np.asarray(gate_scores(routing.scores_TE, config.moe))
        step = 1 + place // len(config.moe_layers)
        found = cache.look_up(layer, np.asarray(routing.ids_TK), scores_TE, step)
        hits_L[layer] += len(found.hits)
        misses_L[layer] += len(found.misses)
        for expert in found.misses:
            cache.admit(layer, int(expert))
    counts = engine.counts()
    np.testing.assert_array_equal(counts.hits_L, hits_L)
    np.testing.assert_array_equal(counts.misses_L, misses_L)
    held_L = counts.misses_L - counts.evictions_L
    np.testing.assert_array_equal(held_L, [0, slots, slots])
    assert (counts.evictions_L[1:] > STEPS // 8).all() and (hits_L[1:] > 0).all()


@pytest.mark.parametrize(
    "name, dtype, lengths, slots, policy, pool",
    [
        ("gqa", np.float32, THREE, 3, "lru", True),
        ("gpt_oss", BF16, NINE, 1, "smoe_score", False),
    ],
)
def test_logits_equal_resident_in_waves(name, dtype, lengths, slots, policy, pool):
    engine = fused_of(weights_of(name, dtype), slots, policy, pool)
    logits = greedy_logits(engine, random_prompts(ALL[name], lengths))
    np.testing.assert_array_equal(logits, resident_logits(name, dtype, lengths))
    assert (engine.counts().evictions_L[1:] > STEPS // 8).all()


def test_counters_in_waves_call_nothing_a_hit_that_travelled(monkeypatch):
    config, seen = ALL["gqa"], []
    engine = fused_of(weights_of("gqa", np.float32), 3, "lru", True)

    def begin():
        engine.clear()
        # A form of which the host can cut the waves, on every backend.
        monkeypatch.setattr(programs, "choose_method", lambda *_, **__: "pairs")

    greedy_logits(
        engine,
        random_prompts(config, THREE),
        after_prefill=begin,
        on_routing=lambda layer, routing: seen.append((layer, routing)),
    )
    # The same on the host, wave by wave: a hit is an expert that none of them fetched.
    spec, E = spec_of(config, 3, pool=True), config.moe.num_experts
    cache = SlotCache(spec, get_eviction("lru"))
    hits_L, fetches_L, distinct_L = np.zeros((3, config.num_layers), int)
    for place, (layer, routing) in enumerate(seen):
        ids_TK, fetched = np.asarray(routing.ids_TK), []
        scores_TE = np.asarray(gate_scores(routing.scores_TE, config.moe))
        for first, end in cut_runs(ids_TK.ravel(), E, spec.num_slots):
            wave_TK = np.full_like(ids_TK, E)
            wave_TK.flat[first:end] = ids_TK.flat[first:end]
            step = 1 + place // len(config.moe_layers)
            for expert in cache.look_up(layer, wave_TK, scores_TE, step).misses:
                cache.admit(layer, expert)
                fetched.append(expert)
        chosen = set(ids_TK.ravel().tolist()) - {E}
        distinct_L[layer] += len(chosen)
        hits_L[layer] += len(chosen - set(fetched))
        fetches_L[layer] += len(fetched)
    counts = engine.counts()
    np.testing.assert_array_equal(counts.hits_L, hits_L)
    np.testing.assert_array_equal(counts.misses_L, fetches_L)
    assert (hits_L + fetches_L >= distinct_L).all() and (hits_L[1:] > 0).all()


def test_decode_compiles_once_and_writes_in_place():
    engine = shared_engine(*BITS[:2], 4, RECORDS)
    prompts = random_prompts(GQA, NINE)
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, prompts)
    tokens = jax.device_put(np.asarray([1], np.int32))
    active = jax.device_put(np.ones(1, bool))
    logits = engine.decode(session, tokens, active)
    compiled = engine.num_compiled()
    slots, keys = engine._state.slots_SR, session.caches[1]["k"]
    slots, keys = slots.unsafe_buffer_pointer(), keys.unsafe_buffer_pointer()
    for _ in range(20):
        tokens = jax.device_put(np.asarray(logits).argmax(-1).astype(np.int32))
        with jax.transfer_guard("disallow"):
            logits = engine.decode(session, tokens, active)
    assert engine._state.slots_SR.unsafe_buffer_pointer() == slots
    assert session.caches[1]["k"].unsafe_buffer_pointer() == keys
    engine.prefill(engine.new_session(1, CAPACITY), prompts)
    assert engine.num_compiled() == compiled


def test_restart_keeps_the_slots_memory_and_forgets_what_they_hold():
    engine = shared_engine(*BITS[:2], 4, RECORDS)
    prompts = random_prompts(GQA, NINE)
    counts = []
    for _ in range(2):
        slots = engine._state.slots_SR.unsafe_buffer_pointer()
        engine.restart()
        assert engine._state.slots_SR.unsafe_buffer_pointer() == slots
        assert engine.movement() == {"hit_ratio": None, "bytes_moved": 0}
        np.testing.assert_array_equal(
            greedy_logits(engine, prompts), resident_logits(*BITS)
        )
        counts.append(engine.counts())
    np.testing.assert_array_equal(*counts)


def test_substitution_at_zero_is_off_and_above_zero_spares_transfers():
    prompts, moved = random_prompts(GQA, NINE), []
    for a in (0.0, 0.5):
        route = get_route("substitute", a=a)
        engine = fused_of(weights_of(*BITS[:2]), 4, RECORDS, route=route)
        logits = greedy_logits(engine, prompts, after_prefill=engine.clear)
        moved.append(engine.counts().misses_L.sum())
        assert np.array_equal(logits, resident_logits(*BITS)) == (a == 0)
    assert moved[1] < moved[0] / 2


def test_generate_runs_on_the_fused_engine():
    prompts = random_prompts(GQA, NINE)
    new = CAPACITY - NINE[0]  # so many that the session's capacity is the one of all
    tokens = generate(shared_engine(*BITS[:2], 4, RECORDS), prompts, new).tokens
    logits_VB = resident_logits(*BITS)[:STEPS, 0]
    assert tokens[0][:STEPS] == logits_VB.argmax(-1).tolist()


def test_spec_of_another_model_is_refused():
    weights = weights_of("gqa", np.float32)
    spec = CacheSpec(3, 12, 2, (1, 2))
    with pytest.raises(ConfigError, match=r"\(3, 12, 2\), the model has \(3, 12, 3\)"):
        FusedEngine(weights, weights.experts, spec, get_eviction("lru"))


def test_sessions_that_take_turns_keep_their_own_records():
    engine = shared_engine(*BITS[:2], 4, RECORDS)
    prompts = [random_prompts(GQA, NINE, seed) for seed in (1, 2)]
    sessions = [engine.new_session(1, CAPACITY) for _ in prompts]
    token, active = jax.device_put((np.ones(1, np.int32), np.ones(1, bool)))
    seen = []
    for session, prompt in zip(sessions, prompts, strict=True):
        engine.prefill(session, prompt)
        seen.append(np.array(engine._state.policy["tokens_B"])[:-1])
        assert seen[-1].sum() == 2 * 9 * 3, "a record begins with its prompt"
    assert (seen[0] != seen[1]).any()
    for which in (0, 1, 0):
        engine.decode(sessions[which], token, active)
        now = np.array(engine._state.policy["tokens_B"])[:-1]
        assert (now >= seen[which]).all() and (now - seen[which]).sum() == 2 * 3
        seen[which] = now
