"""Experts with homes on several devices: the resident bits, and who holds what."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.homes import AtHome
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.kernels import rows as rows_kernels
from moe_edge.model.record import RecordLayout
from moe_edge.model.sub_experts import split_config
from moe_edge.offload.slots import DonatedSlots
from moe_edge.offload.thread_carrier import ThreadCarrier
from tests.support.layered import (
    NINE,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
    resident_logits,
)
from tests.support.running import SIZES, row, run
from tests.support.sharded import ONE_LAYER, bits
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, GQA, random_prompts

STEPS, FIXED = 16, {"homes": "fixed"}
BITS = ("gqa", BF16, NINE)
MODELS = ALL | {"one": ONE_LAYER, "subs": split_config(ONE_LAYER, 2)}


def devices(count: int) -> list:
    return jax.local_devices()[:count]


def assert_at_home(engine) -> None:
    """Each device has slots of its own, which hold only experts that may live there."""
    homes, slot_LE = engine.cache.homes, engine.cache.slot_LE
    layer_N, expert_N = np.nonzero(slot_LE >= 0)
    home_N = homes.home_S[slot_LE[layer_N, expert_N]]
    if homes.is_fixed:
        np.testing.assert_array_equal(home_N, homes.home_LE[layer_N, expert_N])
    assert {*home_N.tolist()} == {*range(len(homes))}
    store, slots = engine.queue.store, engine.queue.slots
    arrays = slots.array
    assert [array.shape[0] for array in arrays] == list(homes.slots_N)
    assert [array.devices() for array in arrays] == [{d} for d in slots.devices]
    for layer, expert, home in zip(layer_N, expert_N, home_N, strict=True):
        held_SR = np.asarray(arrays[home])
        own = slot_LE[layer, expert] - homes.first_N[home]
        np.testing.assert_array_equal(held_SR[own], store.record(layer, expert))


def assert_moved(engine, slots: int) -> None:
    report = engine.report()
    assert engine.layer_step.counters[True].misses > 0
    moved = sum(each["bytes"] for each in report["homes"])
    assert moved == report["bytes_moved"] > 0
    assert all(each["slots"] == slots for each in report["homes"])


@pytest.mark.parametrize(
    "count, slots, options",
    [
        (2, 2, {}),
        *slow(
            (3, 2, FIXED),
            (3, 3, {"predictor": "stale_gate", "link_bytes_per_s": 2e6}),
            (3, 3, {"predictor": "smoe_partial", "eviction": "smoe_score"}),
            (3, 3, FIXED | {"predictor": "previous"}),
            (3, 3, {"predictor": "previous", "asynchronous": False}),
            (3, 3, {"eviction": "on_demand"}),
            (3, 3, {"route": "substitute", "route_options": {"a": 0.0}}),
        ),
    ],
)
def test_logits_equal_resident_while_homes_evict(count, slots, options):
    engine = layered(*BITS[:2], slots, devices=count, **options)
    assert_same_bits(engine, *BITS, STEPS)
    assert_at_home(engine)
    assert_moved(engine, slots)
    if "predictor" in options:
        assert engine.queue.stats().prefetch.count > 0
    engine.close()


@functools.cache
def resident(name: str, dtype) -> ResidentEngine:
    return ResidentEngine(load_weights(StoreReader(MODELS[name], dtype=dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, count, lengths, ks, slots, options",
    [
        ("one", BF16, 3, (5, 9, 5), (3, 1, 2), 2, {}),
        ("subs", BF16, 4, (5,) * 16, (1, 2, 3, 3) * 4, 3, FIXED),
        ("one", np.float32, 2, (512,), None, 3, {}),
        ("q4_0", np.float32, 3, (40, 3), None, 3, {}),
    ],
)
def test_rows_long_prompts_and_records_of_any_kind_have_the_bits_of_one_device(
    name, dtype, count, lengths, ks, slots, options
):
    config = MODELS[name]
    blocks = len(config.moe_layers) * config.moe.num_experts
    budget = OffloadOptions(device_memory=slots / blocks, **options)
    reader = StoreReader(config, dtype=dtype)
    engine = make_offloaded(reader, budget, devices=devices(count))
    got = bits(engine, lengths, ks)
    assert_at_home(engine)
    assert_moved(engine, slots)
    engine.close()
    np.testing.assert_array_equal(got, bits(resident(name, dtype), lengths, ks))


@pytest.mark.slow
def test_assisted_homes_equal_resident_by_gate_b():
    options = {"assist": "two_pointer", "link_bytes_per_s": 2e6}
    engine = layered(*BITS[:2], 3, devices=3, **options)
    logits = forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    expected = resident_logits(*BITS, STEPS)
    assert np.abs(logits - expected).max() <= 1e-5 * expected.std()
    assert engine.backends[0].computed > 0 and engine.backends[0].links == 3


def test_rows_of_a_home_begin_there():
    """On another device they would be sent, and the first wave have own programs."""
    engine = layered(*BITS[:2], 2, devices=2)
    exchange, (_, second) = engine._exchange, devices(2)
    x_TD = jax.device_put(np.zeros((32, GQA.d_model), np.float32), second)
    given = np.zeros((32, GQA.moe.top_k), np.int32), exchange._slots.array[1]
    rows_PD = exchange._programs.start(x_TD, *given)
    assert rows_PD.devices() == {second} and rows_PD.committed


@pytest.mark.slow
def test_rows_join_and_leave_and_no_routing_compiles_after_a_warm_up():
    """Fewer slots than a step may choose: whether it fits depends on the routing."""
    asked = {"top_logprobs": 2}
    rows = [row("a", 40, 6, k=2, **asked), row("b", 9, 7, **asked), row("c", 5, 6, k=1)]
    arrivals = [*zip((0, 1, 3), rows, strict=True)]
    options = OffloadOptions(device_memory=3 / 11, predictor="previous")
    reader = StoreReader(ONE_LAYER, dtype=BF16)
    engine = make_offloaded(reader, options, devices=devices(2))
    found = {}
    for each in (resident("one", BF16), engine):
        slots = RowSlots(each, **SIZES)
        slots.warm_up()
        compiled = slots.num_compiled()
        found[each] = run(slots, arrivals)
        assert slots.num_compiled() == compiled
    assert len(set(map(repr, found.values()))) == 1
    assert engine.moved().bytes > 0
    engine.close()


def test_a_budget_is_of_each_device_and_the_first_holds_the_rest():
    reader, record_bytes = StoreReader(GQA), 4 * RecordLayout.of(GQA).size

    def slots_of(budget, **homes):
        options = OffloadOptions(device_memory=budget, **homes)
        engine = make_offloaded(reader, options, capacity=8, devices=devices(2))
        engine.close()
        slots_N = engine.cache.homes.slots_N
        assert engine.report()["slots"] == sum(slots_N)
        held_bytes = engine.device_bytes() - sum(slots_N) * record_bytes
        return slots_N, held_bytes

    assert slots_of("25%")[0] == (6, 6)
    # No more slots than experts, all devices together.
    (first, second), dense_bytes = slots_of("100%")
    assert (first, second) == (12, 12)
    some = f"{dense_bytes + 40_000 + 9 * record_bytes}B"
    assert slots_of(some)[0] == (9, 15)
    assert slots_of(some, homes="fixed")[0] == (9, 12)  # as many as live there
    with pytest.raises(CapacityError, match=f"dense weights {dense_bytes}, KV cache"):
        slots_of(f"{9 * record_bytes}B")


def test_a_profile_decides_about_homes_and_slots(monkeypatch):
    from moe_edge.engine import run_context

    counts_LE = np.zeros((3, 12), np.int64)
    counts_LE[1:, :2] = 100  # in turn, layer 2's would meet
    monkeypatch.setattr(run_context, "count_trace", lambda *_: counts_LE)
    given = {"device_memory": "30%", "profile_trace": "t", "slot_plan": "adapmoe_dp"}
    options = OffloadOptions(**given, homes="fixed")
    engine = make_offloaded(StoreReader(GQA), options, devices=devices(2))
    engine.close()
    homes = engine.cache.homes
    assert (homes.home_LE[1:, 0] != homes.home_LE[1:, 1]).all()
    assert (np.bincount(homes.home_LE[1]) == 6).all()
    assert homes.slots_N == (7, 7)
    with pytest.raises(ConfigError, match="hit_curves .* got 2 devices; give profile"):
        given = dataclasses.replace(options, slot_plan_options={"hit_curves": [[1]]})
        refuse(Asked.of(given, devices=2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fused"}, "mode fused runs on one device, got 3 devices; use mode"),
        ({"layer_io": "packed"}, "layer_io packed speaks to one device, got 3 dev"),
        ({"memory": "pinned"}, "memory pinned is pinned for one device, got 3 devices"),
        ({"homes": "near"}, "unknown homes 'near'"),
    ],
)
def test_what_has_no_homes_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_offload(StoreReader(GQA), OffloadOptions(**options), devices=devices(3))


def test_a_device_may_hold_one_expert_of_a_layer_and_one_too_many_holds_none():
    few = dataclasses.replace(GQA, moe=dataclasses.replace(GQA.moe, num_experts=3))
    for plan, slots_N in (("auto", (2, 2, 2)), ("equal", (4, 4, 4))):
        given = {"device_memory": "100%", "slot_plan": plan}
        options = OffloadOptions(**given, homes="fixed")
        engine = make_offloaded(StoreReader(few), options, devices=devices(4))
        engine.close()
        assert engine.cache.homes.slots_N == slots_N


@pytest.mark.slow
def test_homes_elsewhere_than_on_a_cpu_get_blocks_from_threads(monkeypatch):
    """Slots that programs write, on each device by its own queue's thread."""

    def make_slots(*shape, device):
        return DonatedSlots(*shape, device)

    monkeypatch.setattr("moe_edge.engine.make_layered.make_slots", make_slots)
    engine = layered(*BITS[:2], 3, devices=3, predictor="stale_gate")
    assert all(type(each) is ThreadCarrier for each in engine.queue.carriers)
    assert_same_bits(engine, *BITS, STEPS)
    assert_at_home(engine)
    assert_moved(engine, 3)
    engine.close()


@pytest.mark.slow
def test_homes_recover_after_a_transfer_that_failed(monkeypatch):
    engine = layered(*BITS[:2], 3, devices=3, predictor="stale_gate")
    store, left = engine.queue.store, [20]

    def record(layer, expert):
        left[0] -= 1
        if not left[0]:
            raise OSError("no such block")
        return store.record(layer, expert)

    for carrier in engine.queue.carriers:
        monkeypatch.setattr(carrier, "_source", record)
    with pytest.raises(OSError, match="no such block"):
        forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    engine.recover()
    assert (engine.cache.slot_LE < 0).all()
    assert_same_bits(engine, *BITS, STEPS)
    engine.close()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_are_weighted_where_a_gpus_kernel_makes_them(by_kernel, monkeypatch):
    """As on one device; asked before anything is traced."""
    monkeypatch.setattr(rows_kernels, "are_possible", lambda: by_kernel)
    config = ALL["gqa"]
    slots_SR = jnp.zeros((2, RecordLayout.of(config).size), jnp.float32)
    slots = SimpleNamespace(devices=devices(1), array=[slots_SR])
    at_home = AtHome(None, slots)
    at_home.steps(SimpleNamespace(config=config, variants={}), None)
    weights_TK = at_home._weights_at(0, jnp.ones((1, 2)))
    assert (weights_TK is not None) == by_kernel
