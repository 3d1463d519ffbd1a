"""Quantised experts in every engine: the resident engine's bits, and real bytes."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.hardware.models import ModelShape
from moe_edge.model.quantised import bytes_per_weight
from moe_edge.model.record import RecordLayout
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.store import pin_records
from tests.support.layered import (
    NINE,
    THREE,
    StoreReader,
    assert_same_bits,
    forced_logits,
    layered,
    resident_logits,
    resident_of,
)
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, random_prompts

KINDS = ("q8_0", "q4_0", "mxfp4")
F32, STEPS = np.float32, 16


@pytest.mark.parametrize("name", [*slow("q8_0", "q4_0", "mxfp4"), "int8"])
@pytest.mark.parametrize("lengths, slots", [(NINE, 9), *slow((THREE, 6)), (NINE, 2)])
def test_layered_gives_the_resident_bits(name, lengths, slots):
    """A prompt of 9 tokens runs as pairs, one of 99 in blocks; 2 slots in waves."""
    engine = layered(name, F32, slots)
    assert_same_bits(engine, name, F32, lengths, STEPS)
    assert engine.layer_step.counters[True].misses > STEPS // 3


@pytest.mark.parametrize("name", ["q8_0", *slow("q4_0", "mxfp4", "int8")])
@pytest.mark.parametrize("lengths, slots", [(NINE, 5), *slow((THREE, 3))])
def test_fused_gives_the_resident_bits(name, lengths, slots):
    weights, config = resident_of(name, F32).weights, ALL[name]
    hosts = [None if r is None else pin_records(r) for r in weights.experts]
    weights = dataclasses.replace(weights, experts=(None,) * len(hosts))
    layer_S = tuple(layer for layer in config.moe_layers for _ in range(slots))
    spec = CacheSpec(
        config.num_layers, config.moe.num_experts, config.moe.top_k, layer_S
    )
    engine = FusedEngine(weights, hosts, spec, get_eviction("lru"))
    assert_same_bits(engine, name, F32, lengths, STEPS)
    misses = int(engine.counts().misses_L.sum())
    moved = engine.movement()["bytes_moved"]
    assert misses > STEPS // 3 and moved == misses * RecordLayout.of(config).size


@pytest.mark.parametrize("name", [*slow("q8_0"), "q4_0", *slow("mxfp4", "int8")])
def test_assisted_equals_resident_by_gate_b(name):
    engine = layered(name, F32, 6, assist="two_pointer", link_bytes_per_s=5e5)
    prompts = random_prompts(ALL[name], NINE)
    logits = forced_logits(engine, prompts, STEPS)
    expected = resident_logits(name, F32, NINE, STEPS)
    assert np.abs(logits - expected).max() <= 1e-5 * expected.std()
    assert engine.backends[0].computed > 0


@pytest.mark.parametrize("name", KINDS)
def test_transfers_slots_and_budgets_count_the_bytes_of_blocks(name):
    config, engine = ALL[name], layered(name, F32, 6)
    layout, moe = RecordLayout.of(config), config.moe
    biases = 4 * (2 * 32 + 64) if moe.expert_bias else 0
    assert layout.size == 3 * 64 * 32 * bytes_per_weight(name) + biases
    assert engine.queue.block_bytes == layout.size
    assert engine.queue.slots.num_bytes == 6 * layout.size
    forced_logits(engine, random_prompts(config, NINE), STEPS)
    misses = sum(engine.layer_step.counters[phase].misses for phase in (False, True))
    assert engine.moved().demand_bytes == misses * layout.size
    shape = ModelShape.of(config, "tiny", "made up")
    assert shape.block.num_bytes == 3 * 64 * 32 * bytes_per_weight(name)
    assert shape.block.token_bytes == 2 * 64


def test_an_absolute_budget_buys_more_quantised_slots():
    config = ALL["q8_0"]
    weights = resident_of("q8_0", F32).weights
    empty = dataclasses.replace(weights, experts=(None,) * config.num_layers)
    layout = RecordLayout.of(config)
    plain = dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, expert_kind=None)
    )
    assert RecordLayout.of(plain).num_bytes(F32) > 3.7 * layout.size

    def engine_with(slots, **options):
        needed = empty.num_bytes + slots * layout.size
        budget = OffloadOptions(device_memory=f"{needed + 70_000}B", **options)
        return make_offloaded(StoreReader(config), budget, capacity=8)

    few, many = (engine_with(n).cache.spec.num_slots for n in (6, 12))
    assert many - few == 6
    with pytest.raises(CapacityError, match=f"slots of {layout.size} bytes"):
        make_offloaded(StoreReader(config), OffloadOptions(device_memory="1KiB"))
