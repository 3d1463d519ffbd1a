"""The layered engine computes the resident engine's bits, whatever it moves."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.engine.offload_options import AVAILABLE
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.offload.link import TransferLink
from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import policy_of
from moe_edge.workload.traces import DECODE, PREFILL
from tests.support.layered import (
    CAPACITY,
    NINE,
    STEPS,
    THREE,
    assert_same_bits,
    forced_logits,
    layered,
    resident_of,
)
from tests.support.prefetches import LazyLink
from tests.support.slow_cases import slow
from tests.support.tiny_models import BF16, GQA, random_prompts

BITS = ("gqa", BF16, NINE)  # compiled once for most tests here
BATCH = ("gqa", np.float32, THREE)
RUNNABLE = [name for name, kind in EVICTIONS.items() if kind.needs <= AVAILABLE]
COUNTS_LE = np.random.default_rng(0).integers(0, 9, (3, 12))


def engine_of(slots=9, **options):
    return layered(*BITS[:2], slots, **options)


def decode_lookups(trace) -> set:
    """Distinct (step, layer, expert, hit) of decoding."""
    decode_TK = (trace.phase == DECODE)[:, None] & (trace.ids_TK >= 0)
    row, rank = np.nonzero(decode_TK)
    columns = trace.step[row], trace.layer[row], trace.ids_TK[row, rank]
    hit = trace.hit_TK[row, rank]
    return set(zip(*(c.tolist() for c in (*columns, hit)), strict=True))


def decode_misses_L(engine) -> np.ndarray:
    """Distinct experts per layer that decode lookups did not find."""
    found = decode_lookups(engine.trace.trace())
    return np.bincount([layer for _, layer, _, hit in found if not hit], minlength=3)


@pytest.mark.parametrize(
    "name, dtype, lengths, slots, plan",
    [
        (*BITS, 9, "one_pool"),
        (*BATCH, 6, "one_pool"),
        ("mla", np.float32, NINE, 2, "one_pool"),
        *slow(("gpt_oss", BF16, NINE, 8, "equal"), ("gpt_oss", BF16, NINE, 4, "equal")),
        *slow(("parts", np.float32, NINE, 6, "equal")),
    ],
)
def test_logits_equal_resident_while_every_layer_evicts(
    name, dtype, lengths, slots, plan
):
    engine = layered(name, dtype, slots, slot_plan=plan)
    assert_same_bits(engine, name, dtype, lengths)
    assert (decode_misses_L(engine)[1:] > STEPS // 3).all()
    assert engine.layer_step.counters[False].misses > slots
    assert engine.layer_step.counters[True].hits > 0 or slots == 2


@pytest.mark.parametrize("policy", [*RUNNABLE, "static_oracle"])
def test_logits_equal_resident_under_every_eviction_policy(policy):
    profile = {"profile": COUNTS_LE} if policy == "static_oracle" else {}
    engine = engine_of(eviction=policy, eviction_options=profile)
    assert_same_bits(engine, *BITS)
    assert (decode_misses_L(engine)[1:] > 5).all()
    assert (engine.layer_step.counters[True].hits > 0) == (policy != "on_demand")


@functools.cache
def chosen_SLK() -> np.ndarray:
    """What the resident engine chooses: one step of prefill, then each token."""
    seen = []
    forced_logits(
        resident_of(*BITS[:2]),
        random_prompts(GQA, NINE),
        on_routing=lambda layer, routing: seen.append((layer, routing.ids_TK)),
    )
    table = np.full((1 + STEPS, 3, 3), -1, np.int32)
    for place, (layer, ids_TK) in enumerate(seen):
        table[place // 2, layer] = np.asarray(ids_TK)[0]
    return table


def assert_prefetched_and_used(engine, least=5):
    stats, counters = engine.queue.stats(), engine.layer_step.counters[True]
    assert stats.prefetch.count > least
    assert stats.prefetch.bytes > stats.wasted_bytes + stats.unused_bytes
    trace = engine.trace.trace()
    assert counters.hits + counters.misses == len(decode_lookups(trace))


@pytest.mark.parametrize(
    "predictor, horizon, options",
    [
        ("moe_infinity", 3, {}),
        ("stale_gate", 1, {}),
        ("n_layer_gate", 3, {"look_ahead": 3}),
        ("smoe_partial", 1, {"top_a": None}),
        ("oracle", 1, {}),
        ("oracle", 3, {}),
    ],
)
def test_logits_equal_resident_under_every_predictor(predictor, horizon, options):
    if predictor == "oracle":
        options = {"chosen_SLK": chosen_SLK()}
    engine = engine_of(predictor=predictor, predictor_options=options, horizon=horizon)
    if predictor == "moe_infinity":  # speaks from the second sequence on
        assert_same_bits(engine, *BITS)
        engine.reset_records()
    assert_same_bits(engine, *BITS)
    assert_prefetched_and_used(engine)
    accuracy = engine.predictor_run.accuracy
    # SMoE's looks ahead only where demands travel.
    least = STEPS / 2 if predictor == "smoe_partial" else STEPS - 1
    assert accuracy.rounds_LA.sum() >= least
    if predictor == "oracle":
        assert (accuracy.hits_LA == accuracy.predicted_LA).all()


def test_partial_states_are_read_only_where_demands_travel():
    options = {"top_a": None}
    engine = engine_of(predictor="smoe_partial", predictor_options=options, slots=24)
    for _ in range(2):
        engine.reset_records()
        assert_same_bits(engine, *BITS)
        counters = engine.layer_step.counters[True]
        rounds = engine.predictor_run.accuracy.rounds_LA.sum()
        assert rounds <= counters.misses
    assert rounds == counters.misses == 0 < counters.hits


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("predictor", ["previous", "frequency"])
def test_logits_of_a_batch_equal_resident_under_every_predictor(predictor, horizon):
    engine = layered(*BATCH[:2], 6, predictor=predictor, horizon=horizon)
    assert_same_bits(engine, *BATCH)
    assert_prefetched_and_used(engine, least=2)  # seven, less those taken back in time


@pytest.mark.parametrize("predictor", ["none", "previous"])
def test_asynchronous_equals_serial(predictor):
    serial = engine_of(predictor=predictor, asynchronous=False)
    assert_same_bits(serial, *BITS)
    assert serial.layer_step.counters[True].late == 0
    for memory in ("host", "pinned"):  # by the engine's thread, and by another
        engine = engine_of(predictor=predictor, memory=memory)
        assert_same_bits(engine, *BITS)
        if predictor == "none":
            counters = [
                each.layer_step.counters[True].misses for each in (serial, engine)
            ]
            assert counters[0] == counters[1]
            stats = [each.queue.stats().demand for each in (serial, engine)]
            assert stats[0].bytes == stats[1].bytes


@pytest.mark.parametrize("inline", [True, False])
def test_prefetches_are_asked_for_before_the_dispatch_only_if_inline(
    inline, monkeypatch
):
    """Gate A too, with the order of either kind of dispatch."""
    monkeypatch.setattr("moe_edge.engine.layered.is_inline", lambda: inline)
    engine = engine_of(predictor="stale_gate", slots=9)
    seen = []
    for owner, name in ((engine.programs, "advance"), (engine.programs, "experts")):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, call=call: (seen.append("run"), call(*given))[1]
        )
    ask = engine.queue.request_all

    def request_all(blocks, cause, step=None):
        seen.append(cause)
        return ask(blocks, cause, step)

    monkeypatch.setattr(engine.queue, "request_all", request_all)
    assert_same_bits(engine, *BITS)
    # After a demand a prefetch comes before the dispatch in any case.
    alone = [i for i, each in enumerate(seen) if each == "prefetch"]
    alone = [i for i in alone if seen[i - 1] == "run"]
    assert len(alone) > 3
    followed = [seen[i + 1] == "run" for i in alone if i + 1 < len(seen)]
    assert all(followed) if inline else not all(followed)


def wrong_SLK() -> np.ndarray:
    table = np.random.default_rng(0).integers(0, 12, (1 + STEPS, 3, 4))
    table[:, 0] = -1  # a dense layer
    return table


def test_blocks_take_the_time_of_a_slow_link():
    options = {"predictor": "oracle", "predictor_options": {"chosen_SLK": wrong_SLK()}}
    engine = engine_of(link_bytes_per_s=2e6, **options)  # 1.9 ms a block
    assert_same_bits(engine, *BITS)
    stats = engine.queue.stats()
    moved = stats.demand.bytes + stats.prefetch.bytes
    seconds = stats.demand.seconds + stats.prefetch.seconds
    assert seconds >= 0.99 * moved / 2e6
    assert engine.layer_step.counters[True].wait_s > 0


def test_busy_link_makes_true_prefetches_late_and_takes_wrong_ones_back():
    found = []
    for table in (chosen_SLK(), wrong_SLK()):
        options = {"predictor": "oracle", "predictor_options": {"chosen_SLK": table}}
        engine = engine_of(**options)
        engine.queue.carriers[0].link = LazyLink(5)
        assert_same_bits(engine, *BITS)
        counters, stats = engine.layer_step.counters[True], engine.queue.stats()
        found.append((counters.late, stats.cancelled, stats.wasted_bytes))
    (late, cancelled, wasted), of_wrong = found
    assert late > 10 and cancelled == wasted == 0
    assert of_wrong[1] > 10 and of_wrong[2] > 0


def test_warm_equals_cold_and_a_second_session_the_first():
    engine = engine_of(predictor="previous")
    for _ in range(2):
        assert_same_bits(engine, *BITS)
    others = random_prompts(GQA, (5,), seed=3)
    expected = forced_logits(resident_of(*BITS[:2]), others, 8)
    np.testing.assert_array_equal(forced_logits(engine, others, 8), expected)


def test_sessions_may_take_turns():
    engines = resident_of(*BITS[:2]), engine_of(predictor="stale_gate")
    logits = []
    for engine in engines:
        prompts = [random_prompts(GQA, (9,), seed) for seed in (1, 2)]
        sessions = [engine.new_session(1, CAPACITY) for _ in prompts]
        both = zip(sessions, prompts, strict=True)
        last = [np.asarray(engine.prefill(*pair)) for pair in both]
        active = jax.device_put(np.ones(1, bool))
        for step in range(20):
            which = step % 3 % 2
            tokens = jax.device_put(last[which].argmax(-1).astype(np.int32))
            last[which] = np.asarray(engine.decode(sessions[which], tokens, active))
            logits.append(last[which])
    np.testing.assert_array_equal(logits[20:], logits[:20])


def test_sessions_that_take_turns_keep_their_own_eviction_records():
    engine = engine_of(eviction="moe_infinity")
    prompts = [random_prompts(GQA, NINE, seed) for seed in (1, 2)]
    sessions = [engine.new_session(1, CAPACITY) for _ in prompts]
    token, active = jax.device_put((np.ones(1, np.int32), np.ones(1, bool)))
    seen, cache = [], engine.cache
    for session, prompt in zip(sessions, prompts, strict=True):
        engine.prefill(session, prompt)
        seen.append(cache.state["tokens_B"][:-1].copy())
        assert seen[-1].sum() == 2 * 9 * 3, "a record begins with its prompt"
    for which in (0, 1, 0):
        engine.decode(sessions[which], token, active)
        now = cache.state["tokens_B"][:-1].copy()
        assert (now >= seen[which]).all() and (now - seen[which]).sum() == 2 * 3
        seen[which] = now
    del sessions[0], session  # the record of one that is gone ends
    engine.new_session(1, CAPACITY)
    assert len(cache._records) == 1


def test_ended_rows_cost_nothing():
    engine, expected = engine_of(), resident_of(*BITS[:2])
    logits = []
    for each in (engine, expected):
        session = each.new_session(1, CAPACITY)
        each.prefill(session, random_prompts(GQA, NINE))
        engine.reset_records()
        tokens = jax.device_put(np.array([3], np.int32))
        ended = jax.device_put(np.zeros(1, bool))
        logits.append(np.asarray(each.decode(session, tokens, ended)))
    np.testing.assert_array_equal(*logits)
    assert engine.movement() == {"hit_ratio": None, "bytes_moved": 0}


def test_on_routing_sees_what_the_resident_engine_chose():
    seen = []
    for engine in (resident_of(*BITS[:2]), engine_of()):
        calls = []
        forced_logits(
            engine,
            random_prompts(GQA, NINE),
            3,
            on_routing=lambda layer, r, calls=calls: calls.append(
                (layer, *jax.device_get((r.ids_TK, r.weights_TK)))
            ),
        )
        seen.append(calls)
    assert [layer for layer, *_ in seen[0]] == [1, 2] * 4
    jax.tree.map(np.testing.assert_array_equal, *seen)


def test_engine_survives_an_exception_half_way():
    engine = engine_of(predictor="previous", link_bytes_per_s=4e6)
    calls = []

    def fail(layer, routing):
        calls.append(layer)
        if len(calls) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forced_logits(engine, random_prompts(GQA, NINE), on_routing=fail)
    assert_same_bits(engine, *BITS)


@pytest.mark.parametrize("model, dtype, slots", [("gqa", BF16, 9)])
@pytest.mark.parametrize("name", RUNNABLE)
def test_replay_of_its_trace_finds_what_the_engine_found(name, model, dtype, slots):
    # A prompt of one token, so that prefill and its replay make the same lookups.
    engine = layered(model, dtype, slots, eviction=name)
    forced_logits(engine, random_prompts(GQA, (1,)))
    trace, spec = engine.trace.trace(), engine.cache.spec
    result = replay(trace, policy_of(name, trace), spec.layer_S)
    np.testing.assert_array_equal(result.misses_L, decode_misses_L(engine))
    counters = engine.layer_step.counters[True]
    assert result.hits_L.sum() == counters.hits
    assert result.misses_L.sum() == counters.misses


def test_replay_weighs_logits_as_the_engine_does():
    # The scores of a gpt_oss router are logits.
    engine = layered("gpt_oss", BF16, 8, slot_plan="equal", eviction="smoe_score")
    forced_logits(engine, random_prompts(GQA, (1,)))
    trace, spec = engine.trace.trace(), engine.cache.spec
    result = replay(trace, policy_of("smoe_score", trace), spec.layer_S)
    np.testing.assert_array_equal(result.misses_L, decode_misses_L(engine))


def test_static_policy_learns_from_the_prompt_of_every_session():
    engine = engine_of(eviction="static_prompt")
    for _ in range(2):
        forced_logits(engine, random_prompts(GQA, NINE), 2)
        assert engine.cache.state["count_B"][:-1].sum() == 2 * 9 * 3


def test_trace_counts_the_bytes_of_lookups_in_waves():
    engine = layered(*BATCH[:2], 6)
    assert_same_bits(engine, *BATCH)
    moved = engine.queue.stats().demand.bytes
    assert engine.trace.trace().bytes_TK.sum() == moved


def test_failed_serial_transfer_leaves_no_block_behind():
    engine = engine_of(asynchronous=False)
    (carrier,) = engine.queue.carriers
    link, carrier.link = carrier.link, BrokenLink()
    with pytest.raises(OSError, match="the disk is gone"):
        assert_same_bits(engine, *BITS)
    carrier.link = link
    assert_same_bits(engine, *BITS)


def test_trace_holds_the_counters_and_the_bytes():
    engine = engine_of()
    assert_same_bits(engine, *BITS)
    trace, counters = engine.trace.trace(), engine.layer_step.counters[True]
    decode = trace.phase == DECODE
    assert trace.hit_TK[decode].sum() == counters.hits
    assert (~trace.hit_TK[decode]).sum() == counters.misses
    assert trace.bytes_TK[decode].sum() == counters.misses * 3840
    assert trace.wait_s_TK[decode].sum() == pytest.approx(counters.wait_s, rel=1e-3)
    assert ((trace.phase == PREFILL).sum(), decode.sum()) == (9 * 2, STEPS * 2)
    np.testing.assert_array_equal(np.unique(trace.step[~decode]), np.arange(9))
    assert (np.diff(trace.step) >= 0).all()
    ids_LK = trace.ids_TK[decode].reshape(STEPS, 2, 3)
    np.testing.assert_array_equal(ids_LK, chosen_SLK()[1:, 1:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 2},
        {"predictor": "stale_gate"},
        {"predictor": "smoe_partial"},
        {"route": "substitute", "eviction": "smoe_score"},
    ],
)
def test_nothing_is_compiled_while_a_sequence_grows(options):
    engine = engine_of(**options)
    forced_logits(engine, random_prompts(GQA, NINE), 2)
    compiled = engine.num_compiled()
    forced_logits(engine, random_prompts(GQA, NINE), 40)
    assert engine.num_compiled() == compiled


class BrokenLink(TransferLink):
    def transfer(self, *_):
        raise OSError("the disk is gone")


@pytest.mark.parametrize("predictor", ["previous", "stale_gate"])
def test_planning_holds_no_device_array_and_makes_no_program(predictor, monkeypatch):
    # So it can neither wait for the device nor run something on it.
    engine = layered(slots=9, predictor=predictor, with_trace=False)
    forced_logits(engine, random_prompts(GQA, NINE))
    layer_step, planned = engine.layer_step, []
    begin, ask = layer_step.begin, layer_step.residency.ask

    def on_host(tree):
        return not any(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))

    def checked_begin(reading):
        taken = reading.ids_TK, reading.scores_TE, reading.wanted_NE
        assert on_host(taken) and on_host(engine.cache.state)
        visit = begin(reading)
        assert on_host(engine.predictor_run.state)
        return visit

    def checked_ask(blocks, *args):
        planned.append(len(blocks))
        return ask(blocks, *args)

    monkeypatch.setattr(layer_step, "begin", checked_begin)
    monkeypatch.setattr(layer_step.residency, "ask", checked_ask)
    before = engine.num_compiled()
    forced_logits(engine, random_prompts(GQA, NINE))
    assert engine.num_compiled() == before and sum(planned) > STEPS


def test_dead_mover_raises_what_it_died_of():
    engine = engine_of()
    session = engine.new_session(1, CAPACITY)
    engine.queue.carriers[0].link = BrokenLink()
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            engine.prefill(session, random_prompts(GQA, NINE))
        session.lengths = [0]
    with pytest.raises(OSError, match="the disk is gone"):
        engine.new_session(1, CAPACITY)


def test_closed_mover_refuses_and_does_not_hang():
    engine = engine_of()
    session = engine.new_session(1, CAPACITY)
    engine.queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.prefill(session, random_prompts(GQA, NINE))
