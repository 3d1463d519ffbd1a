"""Copies of experts on several devices: each step computes one, with the same bits.

The devices are those that tests/conftest.py asks of JAX: cores of one machine.
"""

import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import DeviceOptions, check_replicas
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.programs import jit_step
from moe_edge.engine.replicas import choose_devices, replicas_of, with_replicas
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sharded import ShardedEngine, load_sharded
from moe_edge.engine.sharded_experts import (
    counted_places,
    even_places,
    put_experts,
    slots_of,
)
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.weights import load_weights
from moe_edge.model.experts import run_experts
from moe_edge.model.sub_experts import split_config
from tests.engine.test_sharded_experts import LAYOUT, RULE, given, sharded_run
from tests.support.running import SIZES, row, run
from tests.support.sharded import ONE_LAYER, bits, collectives, step_text
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, BF16, RandomReader

E = 11
COUNTS_E = np.array([90, 80, 70, 3, 2, 1, 0, 0, 0, 0, 0])
MODELS = ALL | {"one": ONE_LAYER, "subs": split_config(ONE_LAYER, 2)}


def places_of(devices: int, replicas: int) -> np.ndarray:
    return with_replicas(counted_places(COUNTS_E, devices), COUNTS_E, replicas)


def choice_of(ids_TK, held_NE) -> np.ndarray:
    made = replicas_of(held_NE, held_NE.shape[1])
    return np.asarray(jax.jit(choose_devices)(np.asarray(ids_TK, np.int32), made))


def test_free_slots_hold_copies_of_the_most_used_experts():
    places_NS = places_of(3, 1)
    assert places_NS.shape == (3, 5) and (places_NS < E).all()
    copies_E = np.bincount(places_NS.reshape(-1), minlength=E)
    assert copies_E.sum() == 15  # one slot was empty before
    assert sorted(copies_E[:3]) == [2, 2, 3] and (copies_E[3:] == 1).all()
    assert all(len(set(own_S)) == 5 for own_S in places_NS.tolist())
    everywhere = places_of(3, E - 4)
    assert [sorted(own_S) for own_S in everywhere.tolist()] == [[*range(E)]] * 3
    unused = with_replicas(even_places(E, 3), np.zeros(E, int), 2)
    assert np.bincount(unused.reshape(-1), minlength=E).max() == 2


def test_a_step_gives_each_expert_to_the_least_busy_device_that_holds_it():
    held_NE = np.zeros((3, 4), bool)
    held_NE[0, [0, 1, 2]] = held_NE[1, [1, 3]] = held_NE[2, [2, 3]] = True
    # Five pairs of expert 0, which device 0 alone has; 3 of 2, two of 1, one of 3.
    ids_TK = [[0, 2], [0, 2], [0, 2], [0, 1], [0, 1], [3, 4]]
    assert choice_of(ids_TK, held_NE).tolist() == [0, 1, 2, 1]
    # The same experts, other pairs: as many of 1 and 2, so the first of them first.
    assert choice_of([[1, 2], [1, 2], [3, 3]], held_NE).tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize(
    ("devices", "tokens", "is_less"),
    [(3, 16, True), *slow((2, 3, False), (4, 1, False), (4, 512, True))],
)
def test_choice_is_of_a_device_that_holds_it_and_the_busiest_has_no_more(
    devices, tokens, is_less
):
    """Less where the pairs at home can be shared better."""
    rng, share = np.random.default_rng(1), -(-E // devices)
    ids_TK = rng.permuted(np.tile(np.arange(E + 1), (tokens, 1)), axis=1)[:, :3]
    held_NE = slots_of(places_of(devices, 3), E) < share + 3
    device_E = choice_of(ids_TK, held_NE)
    assert held_NE[device_E, np.arange(E)].all()
    pairs_E = np.bincount(ids_TK.reshape(-1), minlength=E)[:E]
    home_NE = slots_of(counted_places(COUNTS_E, devices), E) < share
    without = (home_NE * pairs_E).sum(axis=1).max()
    busiest = np.bincount(device_E, pairs_E, devices).max()
    assert busiest <= without - is_less


@pytest.mark.parametrize(
    ("jit", "tokens", "dtype", "devices"),
    [
        (jit_step, 7, np.uint16, 4),
        (jit_step, 40, np.float32, 3),
        *slow((jax.jit, 7, np.uint16, 3), (jax.jit, 40, np.float32, 2)),
    ],
)
def test_sums_have_the_bits_of_one_device_unless_copies_are_computed_twice(
    jit, tokens, dtype, devices
):
    *choice, records_ER = given(tokens, dtype)
    plain = jit(functools.partial(run_experts, layout=LAYOUT, **RULE))
    want = np.asarray(plain(*choice, records_ER))
    places_NS = places_of(devices, 2)
    mesh, run_all = sharded_run(places_NS, jit)
    experts = put_experts(mesh, records_ER, places_NS)
    assert experts.replicas is not None
    moved = mesh.put(choice)
    np.testing.assert_array_equal(run_all(*moved, experts), want)
    text = run_all.lower(*moved, experts).compile().as_text()
    few, many = ["all-reduce"], ["reduce-scatter", "all-gather"]
    assert [name for name, _ in collectives(text)] == (few if tokens == 7 else many)
    planted = experts._replace(replicas=None)  # each device computes all it holds
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(run_all(*moved, planted), want)


def counted(name: str, dtype, devices: int, replicas: int, programs=None):
    counts_E = np.random.default_rng(0).integers(0, 99, MODELS[name].moe.num_experts)
    counts_LE = np.tile(counts_E, (MODELS[name].num_layers, 1))
    mesh, reader = local_mesh(devices), RandomReader(MODELS[name], dtype=dtype)
    weights = load_sharded(reader, mesh, counts_LE=counts_LE, replicas=replicas)
    return ShardedEngine(weights, mesh, programs=programs)


@functools.cache
def resident(name: str, dtype) -> ResidentEngine:
    return ResidentEngine(load_weights(RandomReader(MODELS[name], dtype=dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "devices", "lengths", "ks"),
    [
        ("one", BF16, 2, (7,), None),
        ("one", BF16, 3, (5, 9, 5), (3, 1, 2)),
        ("subs", BF16, 4, (5,) * 16, (1, 2, 3, 3) * 4),
        ("q8_0", np.float32, 3, (512,), (2,)),
    ],
)
def test_logits_have_the_bits_of_one_device(name, dtype, devices, lengths, ks):
    engine = counted(name, dtype, devices, 2)
    got = bits(engine, lengths, ks)
    np.testing.assert_array_equal(got, bits(resident(name, dtype), lengths, ks))


@pytest.mark.slow
def test_rows_join_and_leave_and_nothing_compiles_or_sends_a_record():
    engine, found = counted("one", BF16, 3, 2), {}
    pairs = 3 * ONE_LAYER.moe.top_k
    wanted = [("all-reduce", pairs * ONE_LAYER.d_model)]
    assert collectives(step_text(engine, 3)) == wanted
    asked = {"top_logprobs": 2}
    rows = [(0, row("a", 40, 6, k=2, **asked)), (1, row("b", 9, 7, **asked))]
    for each in (resident("one", BF16), engine):
        slots = RowSlots(each, **SIZES)
        slots.warm_up()
        compiled = slots.num_compiled()
        found[each] = run(slots, rows)
        assert slots.num_compiled() == compiled
    assert len(set(map(repr, found.values()))) == 1


def test_every_device_holds_so_many_slots_more_and_none_without_copies():
    experts, devices = ONE_LAYER.moe.num_experts, 3
    for replicas in (0, 2):
        (layer,) = counted("one", BF16, devices, replicas).weights.experts
        (shards,) = {each.data.shape[0] for each in layer.records_SR.addressable_shards}
        assert shards == -(-experts // devices) + replicas
        assert (layer.replicas is None) == (not replicas)


@pytest.mark.parametrize("replicas", [-1, True, 1.5, "2"])
def test_what_is_no_number_of_slots_is_refused(replicas):
    with pytest.raises(ConfigError, match="expected a number from 0"):
        DeviceOptions(devices=2, devices_trace="t", devices_replicas=replicas)


def test_copies_without_counts_and_more_than_there_is_room_for_are_refused(monkeypatch):
    mesh = local_mesh(3)
    with pytest.raises(ConfigError, match="no counts say which experts to copy; give"):
        DeviceOptions(devices=3, devices_replicas=1)
    reader = RandomReader(ONE_LAYER, dtype=BF16)
    names = [*reader.dense_layer(0), *reader.top()]
    reader.dense_dtypes = lambda item: dict.fromkeys(names, reader.dtype)
    check_replicas(reader, mesh, 7)
    with pytest.raises(ConfigError, match="is 8, and a device that holds 4 of 11 exp"):
        check_replicas(reader, mesh, 8)
    free = "moe_edge.engine.device_memory.free_device_bytes"
    monkeypatch.setattr(free, lambda: 1000)
    check_replicas(reader, mesh, 0)
    with pytest.raises(ConfigError, match="bytes, and 1000 are free; give fewer"):
        check_replicas(reader, mesh, 1)
