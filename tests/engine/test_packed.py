"""Layered engines that exchange words with their programs: bits, calls, reads."""

import jax
import numpy as np
import pytest

from moe_edge.engine import layer_words, routing_reader
from moe_edge.offload import indexed_slots
from tests.support.layered import (
    CAPACITY,
    NINE,
    STEPS,
    THREE,
    assert_same_bits,
    forced_logits,
    layered,
)
from tests.support.prefetches import note_prefetches
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

BITS = ("gqa", BF16, NINE)
DIRECT = {"layer_io": "direct", "memory": "pinned"}
MOE_LAYERS = 2


@pytest.fixture
def on_device(monkeypatch):
    """Slots are written by programs, as they are elsewhere than on a CPU."""

    def make_slots(*shape, elsewhere):
        return elsewhere(*shape)

    monkeypatch.setattr("moe_edge.engine.make_layered.make_slots", make_slots)


def packed(name="gqa", dtype=BF16, slots=9, **options):
    return layered(name, dtype, slots, **{"layer_io": "packed"} | options)


@pytest.mark.parametrize(
    "name, dtype, lengths, slots, options",
    [
        (*BITS, 9, {}),
        (*BITS, 9, {"with_trace": False}),
        (*BITS, 2, {}),  # decoding in waves
        ("mla", np.float32, NINE, 6, {"with_trace": False}),
        *slow(
            ("gqa", np.float32, THREE, 6, {}),
            ("gpt_oss", BF16, NINE, 8, {"slot_plan": "equal"}),
        ),
        (*BITS, 9, {"predictor": "stale_gate", "with_trace": False}),
        (*BITS, 9, {"predictor": "smoe_partial", "eviction": "smoe_score"}),
        (*BITS, 9, {"predictor": "moe_infinity"}),
    ],
)
def test_logits_equal_resident(name, dtype, lengths, slots, options):
    engine = packed(name, dtype, slots, **options)
    before = engine.programs.attend._cache_size()  # of other tests: programs are shared
    assert_same_bits(engine, name, dtype, lengths)
    assert engine.layer_step.counters[True].misses > slots
    assert engine._calls._steps.attend._cache_size() > 0
    assert engine.programs.attend._cache_size() == before


@pytest.mark.parametrize(
    "options",
    [
        {"layer_io": "packed", "memory": "pinned"},
        {"layer_io": "packed", "predictor": "stale_gate"},
        DIRECT,
        DIRECT | {"with_trace": False},
        DIRECT | {"with_trace": False, "predictor": "stale_gate"},
        DIRECT | {"asynchronous": False},
    ],
)
def test_logits_equal_resident_where_programs_write_slots(options, on_device):
    engine = packed(**options)
    assert isinstance(engine.queue.slots, indexed_slots.IndexedSlots)
    asked = note_prefetches(engine.queue)
    assert_same_bits(engine, *BITS)
    counters, stats = engine.layer_step.counters, engine.queue.stats()
    misses = counters[True].misses + counters[False].misses
    assert misses > 40 and stats.demand.count + stats.prefetch.count >= misses
    # How many of them travel in time is the thread's matter.
    assert (sum(asked) > 20) == ("predictor" in options)


@pytest.mark.parametrize("layer_io", ["packed", "direct"])
def test_prefetches_that_programs_write_in_time_are_used(layer_io, on_device):
    engine = packed(layer_io=layer_io, predictor="stale_gate", memory="pinned")
    asked = note_prefetches(engine.queue, at_once=True)
    assert_same_bits(engine, *BITS)
    stats = engine.queue.stats()
    assert stats.prefetch.count == sum(asked) > 20 and stats.cancelled == 0
    assert stats.prefetch.bytes > stats.wasted_bytes + stats.unused_bytes
    assert engine.layer_step.counters[True].late == 0


@pytest.mark.parametrize(
    "options",
    [
        {"route": "substitute", "route_options": {"a": 0.5}},
        {"assist": "all"},
        {"assist": "all", "predictor": "moe_infinity"},
    ],
)
def test_words_carry_what_routes_and_backends_change(options):
    options = options | {"with_trace": False}
    prompts = random_prompts(GQA, NINE)
    want, got = (
        forced_logits(layered("gqa", BF16, 6, layer_io=io, **options), prompts)
        for io in ("arrays", "packed")
    )
    np.testing.assert_array_equal(got, want)


def test_traces_and_callbacks_see_the_same():
    seen = []
    for layer_io in ("arrays", "packed"):
        calls = []
        engine = packed(layer_io=layer_io, eviction="smoe_score")
        forced_logits(
            engine,
            random_prompts(GQA, NINE),
            3,
            on_routing=lambda layer, r, calls=calls: calls.append(
                (layer, *jax.device_get((r.ids_TK, r.weights_TK)))
            ),
        )
        trace = engine.trace.trace()
        seen.append((calls, trace.ids_TK, trace.weights_TK, trace.scores_TE))
    assert len(seen[0][0]) == 4 * MOE_LAYERS
    jax.tree.map(np.testing.assert_array_equal, *seen)


@pytest.mark.parametrize(
    "options",
    [
        {},
        DIRECT,
        {"predictor": "smoe_partial"},
        *slow(
            DIRECT | {"with_trace": False, "predictor": "stale_gate"},
            {"slots": 2},
            {"route": "substitute", "eviction": "smoe_score"},
        ),
        {"assist": "two_pointer", "link_bytes_per_s": 2e6},
    ],
)
def test_nothing_is_compiled_while_a_sequence_grows(options, on_device):
    engine = packed(**options)
    forced_logits(engine, random_prompts(GQA, NINE), 2)
    compiled = engine.num_compiled()
    forced_logits(engine, random_prompts(GQA, NINE), 40)
    assert engine.num_compiled() == compiled


class Counting:
    """NumPy, counting the arrays of JAX that are read."""

    def __init__(self):
        self.read = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def asarray(self, array, *given):
        self.read += isinstance(array, jax.Array)
        return np.asarray(array, *given)


def decoded(engine, monkeypatch, steps=STEPS):
    """(what `advance` was called with, arrays that were read) while decoding."""
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, random_prompts(engine.config, NINE))
    token_B, active_B = engine.put((np.ones(1, np.int32), np.ones(1, bool)))
    engine.decode(session, token_B, active_B)
    calls, numpy, advance = [], Counting(), engine._calls._steps.advance

    def run(*given):
        calls.append(jax.tree.leaves(given[1:]))
        return advance(*given)

    with monkeypatch.context() as patch:
        patch.setattr(engine._calls._steps, "advance", run)
        patch.setattr(routing_reader, "np", numpy)
        for step in range(steps):
            token_B = engine.put(np.array([step], np.int32))
            engine.decode(session, token_B, active_B)
    assert len(calls) == steps * (MOE_LAYERS - 1)
    return calls, numpy.read / steps / MOE_LAYERS


@pytest.mark.parametrize(
    "options, reads",
    [
        ({"with_trace": False}, 1),
        ({"with_trace": False, "predictor": "stale_gate"}, 1.5),  # the first
        ({"with_trace": True, "eviction": "smoe_score"}, 3),
    ],
)
def test_a_layer_is_one_read_and_no_array_of_the_host(
    options, reads, monkeypatch, on_device
):
    """Where plain arrays take several reads, and a NumPy argument."""
    plain = packed(layer_io="arrays", **options)
    calls, read = decoded(plain, monkeypatch)
    assert read == reads
    assert all(any(isinstance(x, np.ndarray) for x in leaves) for leaves in calls)
    fewer = packed(**options)
    packed_calls, read = decoded(fewer, monkeypatch)
    assert read == 1
    for leaves in packed_calls:
        assert all(isinstance(x, jax.Array) and x.committed for x in leaves)
        in_host_memory = [x for x in leaves if x.sharding.memory_kind == "pinned_host"]
        assert len(in_host_memory) == 1
    # ids, scores and a second mention of the weights stay away.
    assert len(packed_calls[0]) <= len(calls[0]) - 3


@pytest.mark.parametrize("layer_io", ["packed", "direct"])
def test_arrived_blocks_of_a_layer_are_written_by_few_programs(
    layer_io, on_device, monkeypatch
):
    engine = packed(layer_io=layer_io, memory="pinned", with_trace=False, slots=4)
    forced_logits(engine, random_prompts(GQA, NINE), 2)
    queue, written, programs = engine.queue, indexed_slots._write, []
    monkeypatch.setattr(
        indexed_slots,
        "_write",
        lambda slots_SR, numbers, records: (
            programs.append(len(numbers)),
            written(slots_SR, numbers, records),
        )[1],
    )
    session = engine.new_session(1, CAPACITY)
    engine.prefill(session, [[1]])  # one token: not in waves
    engine.reset_records()
    token_B, active_B = engine.put((np.ones(1, np.int32), np.ones(1, bool)))
    demands, ask = [], queue.request_all

    def request_all(blocks, *given):
        demands.append(len(blocks))
        return ask(blocks, *given)

    monkeypatch.setattr(queue, "request_all", request_all)
    programs.clear()
    for step in range(STEPS):
        engine.decode(session, engine.put(np.array([step], np.int32)), active_B)
    assert token_B is not None and sum(demands) > STEPS // 2 and max(demands) == 3
    if layer_io == "packed":  # three in a program for four
        assert programs == [{1: 1, 2: 2, 3: 4}[n] for n in demands]
    else:  # no block travels twice
        want = [size for n in demands for size in {1: [1], 2: [2], 3: [2, 1]}[n]]
        assert programs == want


def test_words_keep_bits():
    rng = np.random.default_rng(0)
    slots_TK = rng.integers(0, 9, (2, 3)).astype(np.int32)
    floats_TK = rng.standard_normal((2, 3)).astype(np.float32)
    floats_TK[0, 0] = np.frombuffer(b"\x01\x00\xa0\x7f", np.float32)[0]  # a NaN
    words, last = layer_words.PinnedWords(jax.local_devices()[0]), None
    for _ in range(2):
        array = words.put(3, [slots_TK, floats_TK])
        assert last is None or array is last, "the same memory"
        assert array.sharding.memory_kind == "pinned_host"
        kinds = ((2, 3), np.int32), ((-1, 3), np.float32)
        for back in (np.array(array), np.asarray(layer_words.pack([array]))):
            ids, floats = layer_words.split(back, kinds)
            np.testing.assert_array_equal(ids, slots_TK)
            assert floats.tobytes() == floats_TK.tobytes()
        last, slots_TK = array, slots_TK + 1
    assert words.put(4, [slots_TK]) is not words.put(3, [slots_TK])


def test_engines_at_other_k_have_words_of_their_own():
    want, got = [], []
    for layer_io, found in (("arrays", want), ("packed", got)):
        engine = packed(layer_io=layer_io, with_trace=False)
        for k in (2, 3):
            prompts = random_prompts(ALL["gqa"], NINE)
            found.append(forced_logits(engine.at_k(k), prompts, 8))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.array_equal(*got)
