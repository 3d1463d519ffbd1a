"""Shadows of quantised experts and of layers that differ, and their bytes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.engine.weights import load_weights, weight_shapes
from moe_edge.model.record import RecordLayout
from moe_edge.offload.store import HostStore
from moe_edge.papers.od_moe.shadow.engine import make_shadow, shadow_bytes
from moe_edge.papers.od_moe.shadow.follower import Follower, read_choices
from tests.support.layered import (
    CAPACITY,
    NINE,
    StoreReader,
    forced_logits,
    resident_logits,
    resident_of,
)
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, MIXED, random_prompts

F32, STEPS = np.float32, 16


@pytest.mark.parametrize("precision", ["full", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("name", ["gqa", "gpt_oss"])
def test_shapes_of_a_shadow_take_what_it_takes(name, precision):
    reader = StoreReader(ALL[name], dtype=ml_dtypes.bfloat16)
    weights, store = load_weights(reader, with_experts=False), HostStore(reader)
    records = jax.ShapeDtypeStruct((store.num_experts, store.record_size), store.dtype)
    want = make_shadow(weights, precision, store).weights.num_bytes
    assert shadow_bytes(weight_shapes(reader), precision, records) == want


@pytest.mark.parametrize("name", [*slow("q8_0"), "q4_0", *slow("mxfp4")])
def test_a_shadow_is_made_of_what_blocks_mean(name):
    weights = resident_of(name, F32).weights
    shadow = make_shadow(weights, "int8")
    layer = ALL[name].moe_layers[0]
    want = RecordLayout.of(ALL[name]).part(np.asarray(weights.experts[layer]), "down")
    found = np.asarray(shadow.weights.experts[layer].down.decode())
    step = np.abs(want).max(axis=-1, keepdims=True) / 127
    assert (np.abs(found - want) <= 0.51 * step).all() and found.any()
    full = make_shadow(weights, "full")
    prompts = random_prompts(ALL[name], NINE)
    logits = forced_logits(full, prompts, STEPS)
    np.testing.assert_array_equal(logits, resident_logits(name, F32, NINE, STEPS))


def test_a_shadow_is_aligned_in_layers_of_both_kinds():
    resident = resident_of("mixed", F32)
    shadow = make_shadow(resident.weights, "int8")
    session = resident.new_session(1, CAPACITY)
    resident.prefill(session, random_prompts(MIXED, [9]))
    chosen, zero_B = [], jnp.zeros(1, jnp.int32)
    for by_message in (False, True):
        follower = Follower(shadow, 1, CAPACITY)
        follower.begin([9])
        if by_message:
            kv = shadow.programs.read_kv(session.caches, zero_B, count=9)
            assert [each.shape[0] for each in kv] == [3, 3, 2]  # k, v; both
            follower.align_kv(jax.device_get(kv), zero_B)
        else:
            follower.copy_all_kv(session.caches)
        choices = follower.step(jnp.ones(1, bool), jnp.array([5], jnp.int32))
        chosen.append(read_choices(choices, 1, 3))
    np.testing.assert_array_equal(*chosen)
