"""Engines of a model whose layers differ in heads, widths, rope, window and sinks."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_fits_model, make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.slots import RowSlots
from tests.support.layered import CAPACITY, StoreReader, resident_of
from tests.support.running import SIZES, alone, row, run, tokens_of
from tests.support.tiny_models import MIXED, random_prompts, score_all

NAME, DTYPE = "mixed", np.float32


@pytest.fixture(scope="module")
def resident():
    return resident_of(NAME, DTYPE)


def test_caches_have_the_sizes_of_their_layers(resident):
    shapes = [
        {name: array.shape for name, array in cache.items()}
        for cache in resident.new_session(2, 60).caches
    ]
    first, other = {"k": (6, 64, 8), "v": (6, 64, 10)}, (4, 64, 12)
    assert shapes == [first, first, {"k": other, "v": other}, first]
    one = [3 * 64 * (8 + 10) * 4, 2 * 64 * (12 + 12) * 4]
    assert cache_bytes(MIXED, 1, 60) == 3 * one[0] + one[1]
    slots = RowSlots(resident, **SIZES)
    assert slots.shapes.row_bytes(60) == 3 * one[0] + one[1]
    budget = slots.shapes.peak_bytes(2 * cache_bytes(MIXED, 1, 60))
    assert budget == 2 * cache_bytes(MIXED, 1, 60) + 3 * one[0]  # the largest: a third
    assert slots.shapes.bytes_within(budget) >= 2 * cache_bytes(MIXED, 1, 60)


@pytest.fixture(scope="module")
def logits(resident):
    return forced(resident)


def forced(engine):
    """Prefill of 20 tokens, then four more, one by one."""
    session = engine.new_session(1, CAPACITY)
    (tokens,) = random_prompts(MIXED, [24])
    out = [engine.prefill(session, [tokens[:20]])]
    for token in tokens[20:]:
        token_B = jax.device_put(np.array([token], np.int32))
        out.append(engine.decode(session, token_B, jax.device_put(np.ones(1, bool))))
    return np.concatenate(jax.device_get(out))


def test_decoding_equals_prefill(resident, logits):
    (whole,) = score_all(resident, random_prompts(MIXED, [24]))
    np.testing.assert_allclose(logits, whole[19:24], atol=1e-5 * whole.std())


@pytest.mark.parametrize("mode", ["layered", "fused"])
def test_offloaded_has_the_resident_bits(mode, logits):
    options = OffloadOptions(mode=mode, device_memory="50%")
    with make_offloaded(StoreReader(MIXED), options) as engine:
        np.testing.assert_array_equal(forced(engine), logits)


@pytest.mark.parametrize(
    "moe",
    [
        {"expert_scale": True},
        {"input_scaled": True, "top_k": 1},
        {"scoring": "sparsemixer", "nearness": 0.1},
    ],
)
def test_routes_that_weigh_by_scores_alone_are_refused(moe):
    config = dataclasses.replace(MIXED, moe=dataclasses.replace(MIXED.moe, **moe))
    check_fits_model(StoreReader(config), OffloadOptions())
    options = OffloadOptions(route="drop", route_options={"threshold": 0.1})
    with pytest.raises(ConfigError, match="route drop weighs experts by router scores"):
        check_fits_model(StoreReader(config), options)


def test_layers_of_one_kind_share_a_program(resident, logits):
    engine = ResidentEngine(resident.weights, layers_per_program=1)
    np.testing.assert_array_equal(forced(engine), logits)
    # A prefill and a step of the dense layer, of layers 1 and 3, and of layer 2.
    assert engine.programs.layers._cache_size() == 2 * 3


def test_rows_join_leave_and_find_their_beginnings(resident):
    slots = RowSlots(resident, **SIZES, prompt_cache_bytes=1 << 20)
    a, b = row("a", 40, 9, k=3), row("b", 12, 6, k=2)
    got = tokens_of(run(slots, [(0, a), (3, b)]))
    assert got == {each.id: alone(NAME, each) for each in (a, b)}
    again = row("a", 40, 9, k=3)
    assert slots.cached_tokens(again.prompt) == 32
    assert tokens_of(run(slots, [(0, again)])) == {"a": got["a"]}
