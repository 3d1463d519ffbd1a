"""Experts with homes on several devices: the resident bits, and who holds what."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.home_plan import check_homes
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.model.record import RecordLayout
from tests.engine.test_slot_k import ARRIVALS as ROWS_OF_K
from tests.engine.test_slot_k import SPLITS
from tests.support.layered import (
    NINE,
    THREE,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
    resident_logits,
)
from tests.support.running import SIZES, alone, log_probs_of, row, run, tokens_of
from tests.support.slow_cases import slow
from tests.support.tiny_models import BF16, GQA, random_prompts

STEPS, FIXED = 16, {"homes": "fixed"}
BITS = ("gqa", BF16, NINE)


def devices(count: int) -> list:
    return jax.local_devices()[:count]


def assert_at_home(engine) -> None:
    """Each device has slots of its own, which hold only experts that may live there."""
    manager = engine.manager
    homes, slot_LE = manager.cache.homes, manager.cache.slot_LE
    layer_N, expert_N = np.nonzero(slot_LE >= 0)
    home_N = homes.home_S[slot_LE[layer_N, expert_N]]
    if homes.is_fixed:
        np.testing.assert_array_equal(home_N, homes.home_LE[layer_N, expert_N])
    assert {*home_N.tolist()} == {*range(len(homes))}
    store, slots = manager.queue.store, manager.queue.slots
    arrays = slots.array
    assert [array.shape[0] for array in arrays] == list(homes.slots_N)
    assert [array.devices() for array in arrays] == [{d} for d in slots.devices]
    for layer, expert, home in zip(layer_N, expert_N, home_N, strict=True):
        held_SR = np.asarray(arrays[home])
        own = slot_LE[layer, expert] - homes.first_N[home]
        np.testing.assert_array_equal(held_SR[own], store.record(layer, expert))


@pytest.mark.parametrize(
    "name, dtype, lengths, count, slots, options",
    [
        (*BITS, 2, 2, {}),
        *slow(
            (*BITS, 3, 2, FIXED),
            ("gqa", np.float32, THREE, 2, 2, {}),  # blocks, three rows
            ("gqa", np.float32, THREE, 3, 2, FIXED),
            ("gqa", np.float32, (5,) * 16, 4, 2, {}),
            ("mla", np.float32, (70,), 4, 2, {}),
            ("q8_0", np.float32, NINE, 3, 3, {}),
            ("q4_0", np.float32, THREE, 3, 2, FIXED),
            ("gpt_oss", BF16, NINE, 3, 4, FIXED | {"slot_plan": "equal"}),
            ("parts", np.float32, THREE, 3, 4, {"slot_plan": "equal"}),
            (*BITS, 3, 3, {"predictor": "stale_gate", "link_bytes_per_s": 2e6}),
            (*BITS, 3, 3, {"predictor": "smoe_partial", "eviction": "smoe_score"}),
            (*BITS, 3, 3, FIXED | {"predictor": "previous", "memory": "pinned"}),
            (*BITS, 3, 3, {"predictor": "previous", "asynchronous": False}),
            (*BITS, 3, 3, {"eviction": "on_demand"}),
            (*BITS, 3, 3, {"route": "substitute", "route_options": {"a": 0.0}}),
        ),
    ],
)
def test_logits_equal_resident_while_homes_evict(
    name, dtype, lengths, count, slots, options
):
    engine = layered(name, dtype, slots, devices=count, **options)
    assert_same_bits(engine, name, dtype, lengths, STEPS)
    assert_at_home(engine)
    manager = engine.manager
    assert manager.counters[True].misses > STEPS // 3
    if "predictor" in options:
        assert manager.queue.stats().prefetch.count > 3
    report = engine.report()
    moved = sum(each["bytes"] for each in report["homes"])
    assert moved == report["bytes_moved"] > 0
    assert all(each["slots"] == slots for each in report["homes"])
    engine.close()


@pytest.mark.slow
def test_assisted_homes_equal_resident_by_gate_b():
    options = {"assist": "two_pointer", "link_bytes_per_s": 2e6}
    engine = layered(*BITS[:2], 3, devices=3, **options)
    logits = forced_logits(engine, random_prompts(GQA, NINE), STEPS)
    expected = resident_logits(*BITS, STEPS)
    assert np.abs(logits - expected).max() <= 1e-5 * expected.std()
    assert engine.backends[0].computed > 0 and engine.backends[0].links == 3


@pytest.mark.slow
def test_rows_join_and_leave_and_no_routing_compiles_after_a_warm_up():
    options = OffloadOptions(device_memory="10%", predictor="previous")
    engine = make_offloaded(StoreReader(GQA), options, devices=devices(3))
    slots = RowSlots(engine, **SIZES)
    slots.warm_up()
    compiled = engine.num_compiled()
    arrivals = [
        (0, row("a", 9, 14, k=3)),
        (2, row("b", 40, 9, k=1)),
        (4, row("c", 5, 6)),
    ]
    got = tokens_of(run(slots, arrivals))
    assert engine.num_compiled() == compiled
    for _, each in arrivals:
        assert got[each.id] == alone("gqa", each)
    engine.close()


@pytest.mark.slow
def test_sub_experts_with_a_k_of_each_row_have_homes():
    reader = StoreReader(SPLITS["pattern"])
    options = OffloadOptions(device_memory="20%")
    engine = make_offloaded(reader, options, devices=devices(3))
    from moe_edge.engine.weights import load_weights

    resident = ResidentEngine(load_weights(reader))
    found = [run(RowSlots(each, **SIZES), ROWS_OF_K) for each in (engine, resident)]
    got, want = map(log_probs_of, found)
    for id, values in want.items():
        np.testing.assert_array_equal(got[id], values)
    assert engine.movement()["hit_ratio"] < 1
    engine.close()


def test_a_budget_is_of_each_device_and_the_first_holds_the_rest():
    reader, record_bytes = StoreReader(GQA), 4 * RecordLayout.of(GQA).size

    def slots_of(budget, **homes):
        options = OffloadOptions(device_memory=budget, **homes)
        engine = make_offloaded(reader, options, capacity=8, devices=devices(2))
        engine.close()
        slots_N = engine.manager.cache.homes.slots_N
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
    from moe_edge.engine import offloaded

    counts_LE = np.zeros((3, 12), np.int64)
    counts_LE[1:, :2] = 100  # in turn, layer 2's would meet
    monkeypatch.setattr(offloaded, "_count_trace", lambda *_: counts_LE)
    given = {"device_memory": "30%", "profile_trace": "t", "slot_plan": "adapmoe_dp"}
    options = OffloadOptions(**given, homes="fixed")
    engine = make_offloaded(StoreReader(GQA), options, devices=devices(2))
    engine.close()
    homes = engine.manager.cache.homes
    assert (homes.home_LE[1:, 0] != homes.home_LE[1:, 1]).all()
    assert (np.bincount(homes.home_LE[1]) == 6).all()
    assert homes.slots_N == (7, 7)
    with pytest.raises(ConfigError, match="hit_curves .* got 2 devices; give profile"):
        given = dataclasses.replace(options, slot_plan_options={"hit_curves": [[1]]})
        check_homes(given, devices(2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fused"}, "mode fused runs on one device, got 3 devices; use mode"),
        ({"layer_io": "packed"}, "layer_io packed speaks to one device, got 3 dev"),
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
        assert engine.manager.cache.homes.slots_N == slots_N
