"""Engines of several devices: one device's bits, and a share of the experts on each.

The devices are those that tests/conftest.py asks of JAX: cores of one machine.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import check_devices, homes_for, mesh_for
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sharded import ShardedEngine, load_sharded
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.sub_experts import split_config
from tests.support.running import SIZES, row, run
from tests.support.sharded import (
    ONE_LAYER,
    assert_shared,
    bits,
    collectives,
    sharded,
    step_text,
)
from tests.support.tiny_models import ALL, BF16, RandomReader

MODELS = ALL | {"one": ONE_LAYER, "subs": split_config(ONE_LAYER, 2)}
THREE, SIXTEEN, LONG = (5, 9, 5), (5,) * 16, (512,)
KS, MANY_KS = (3, 1, 2), (1, 2, 3, 3) * 4


def reader_of(name: str, dtype=BF16) -> RandomReader:
    return RandomReader(MODELS[name], dtype=dtype)


@functools.cache
def resident(name: str, dtype=BF16) -> ResidentEngine:
    return ResidentEngine(load_weights(reader_of(name, dtype)))


@functools.cache
def sharded_of(name: str, dtype, devices: int):
    return sharded(reader_of(name, dtype), devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "devices", "lengths", "ks"),
    [
        ("one", BF16, 3, THREE, KS),
        ("one", BF16, 4, THREE, KS),
        ("one", np.float32, 2, LONG, None),
        ("subs", BF16, 4, SIXTEEN, MANY_KS),
        ("q8_0", np.float32, 3, LONG, (2,)),
        ("q4_0", np.float32, 2, SIXTEEN, MANY_KS),
    ],
)
def test_logits_have_the_bits_of_one_device(name, dtype, devices, lengths, ks):
    got = bits(sharded_of(name, dtype, devices), lengths, ks)
    np.testing.assert_array_equal(got, bits(resident(name, dtype), lengths, ks))


@pytest.mark.slow
def test_experts_placed_by_counts_have_the_bits_of_one_device():
    counts_LE = np.random.default_rng(0).integers(0, 99, (1, 11))
    reader, mesh = reader_of("one"), local_mesh(3)
    weights = load_sharded(reader, mesh, counts_LE=counts_LE)
    assert_shared(weights, 3)
    shared = sharded_of("one", BF16, 3)
    (placed,), (even,) = weights.experts, shared.weights.experts
    assert (np.asarray(placed.slot_NE) != np.asarray(even.slot_NE)).any()
    engine = ShardedEngine(weights, mesh, programs=shared.programs)
    want = bits(resident("one").at_k(2), THREE)  # another operating point
    np.testing.assert_array_equal(bits(engine.at_k(2), THREE), want)


@pytest.mark.slow
def test_a_step_sends_rows_of_pairs_and_no_records():
    engine, rows = sharded_of("one", BF16, 3), 3
    pairs = rows * ONE_LAYER.moe.top_k
    wanted = [("all-reduce", pairs * ONE_LAYER.d_model)]
    assert collectives(step_text(engine, rows)) == wanted


@pytest.mark.slow
def test_rows_join_and_leave_with_the_bits_of_one_device():
    """At several K, with prompts from the prompt cache; nothing compiles after the
    warm-up."""
    asked = {"top_logprobs": 2}
    first, again = row("a", 40, 6, k=2, **asked), row("d", 40, 4, k=2, **asked)
    rows = [(0, first), (1, row("b", 9, 7, **asked)), (3, row("c", 5, 6, k=1, **asked))]
    found = {}
    for engine in (resident("one"), sharded_of("one", BF16, 3)):
        slots = RowSlots(engine, **SIZES, prompt_cache_bytes=1 << 20)
        slots.warm_up()
        compiled = slots.num_compiled()
        found[engine] = run(slots, [*rows, (20, again)])
        assert slots.num_compiled() == compiled
        assert slots.cached_tokens(again.prompt, 2) == 32
    assert len(set(map(repr, found.values()))) == 1


def test_every_device_holds_its_share_of_records():
    reader, devices = reader_of("one"), 3
    weights = load_sharded(reader, local_mesh(devices))
    assert_shared(weights, devices)
    (layer,), (whole_ER,) = weights.experts, load_weights(reader).experts
    shares = [np.asarray(each.data) for each in layer.records_SR.addressable_shards]
    np.testing.assert_array_equal(np.concatenate(shares)[:11], whole_ER)
    assert not shares[-1][-1].any()

    def with_records(records):
        experts = (layer._replace(records_SR=records),)
        return dataclasses.replace(weights, experts=experts)

    first = jax.devices()[0]
    for planted in (
        local_mesh(devices).put(np.asarray(layer.records_SR)),  # on every device
        jax.device_put(np.asarray(layer.records_SR), first),
    ):
        with pytest.raises(AssertionError):
            assert_shared(with_records(planted), devices)


@pytest.mark.parametrize("devices", [0, -1, True, 1.5, "two", "0", "²", []])
def test_what_is_no_number_of_devices_is_refused(devices):
    with pytest.raises(ConfigError, match="expected a number from 1, or 'all'"):
        check_devices(devices)
    assert [check_devices(each) for each in (None, 3, "3", "all")] == [
        None,
        3,
        3,
        "all",
    ]


def test_more_devices_than_there_are_and_dense_models_are_refused():
    reader, there = reader_of("one"), len(jax.devices())
    with pytest.raises(ConfigError, match=f"{there + 1} devices, and JAX sees {there}"):
        mesh_for(reader, there + 1, None)
    with pytest.raises(ConfigError, match=f"{there + 1} devices, and JAX sees {there}"):
        homes_for(reader, there + 1)
    offload = OffloadOptions(device_memory="50%")
    assert mesh_for(reader, 2, offload) is None and len(homes_for(reader, 2)) == 2
    assert homes_for(reader, None) == homes_for(reader, "1") == ()
    reader.config = dataclasses.replace(
        ONE_LAYER, dense_layers=(0,), dense_dim=16, moe=ONE_LAYER.moe
    )
    for refused in (lambda: mesh_for(reader, 2, None), lambda: homes_for(reader, 2)):
        with pytest.raises(ConfigError, match="a dense model has no experts"):
            refused()


def test_devices_without_an_expert_are_allowed_and_said(capsys):
    reader = reader_of("one")
    few = dataclasses.replace(ONE_LAYER.moe, num_experts=3)
    reader.config = dataclasses.replace(ONE_LAYER, moe=few)
    assert mesh_for(reader, 4, None).size == 4
    assert "4 devices share 3 experts a layer: 1 of them hold none" in (
        capsys.readouterr().err
    )


def test_default_is_one_device_unless_it_cannot_hold_the_weights(monkeypatch):
    reader = reader_of("one")
    names = [*reader.dense_layer(0), *reader.top()]
    reader.dense_dtypes = lambda item: dict.fromkeys(names, reader.dtype)
    assert mesh_for(reader, None, None) is None
    assert mesh_for(reader, "all", None).size == len(jax.devices())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    free_bytes = iter((1 << 30, 1 << 14))
    free = "moe_edge.engine.device_memory.free_device_bytes"
    monkeypatch.setattr(free, lambda: next(free_bytes))
    assert mesh_for(reader, None, None) is None
    assert mesh_for(reader, None, None).size == len(jax.devices())
