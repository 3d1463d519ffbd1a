"""Caches in fewer bytes: the same bits in every engine, fewer bytes, near logits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.device_needs import device_needs
from moe_edge.engine.devices import DeviceOptions
from moe_edge.engine.generate import generate
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.prompt_files import PromptFiles
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.split_attention import make_sharded
from moe_edge.engine.weights import weight_shapes
from moe_edge.kernels import native
from moe_edge.model import cached_attention, kv_cache
from moe_edge.model.attention_config import CACHE_TYPES
from tests.support.layered import StoreReader
from tests.support.running import SIZES, log_probs_of, row, run, tokens_of
from tests.support.sharded import ONE_LAYER, bits
from tests.support.slow_cases import slow
from tests.support.tiny_models import GQA, MLA, STATES, random_weights

# Whole blocks of 32: keys of two, values of one; latents that fill a part of theirs.
WIDE = dataclasses.replace(
    ONE_LAYER,
    attention=dataclasses.replace(ONE_LAYER.attention, head_dim=64, v_head_dim=32),
)
LATENT = dataclasses.replace(
    ONE_LAYER, attention=dataclasses.replace(MLA.attention, kv_lora_rank=26)
)
MODELS = {"gqa": WIDE, "mla": LATENT}
LENGTHS = 21, 6
CASES = [("gqa", "q8_0"), *slow(("mla", "bfloat16"))]


@functools.cache
def resident(name: str, kind: str) -> ResidentEngine:
    return ResidentEngine(random_weights(MODELS[name].with_cache(kind)))


@functools.cache
def resident_bits(name: str, kind: str) -> np.ndarray:
    return bits(resident(name, kind), LENGTHS)


def offloaded(name: str, kind: str, mode: str):
    reader = StoreReader(MODELS[name].with_cache(kind))
    options = OffloadOptions(device_memory="50%", mode=mode)
    return make_offloaded(reader, options, batch=2)


@pytest.mark.parametrize(
    "name, kind, mode",
    [
        ("gqa", "q8_0", "fused"),
        *slow(("gqa", "q8_0", "layered"), ("mla", "bfloat16", "layered")),
    ],
)
def test_offloaded_engines_have_the_resident_bits(name, kind, mode):
    with offloaded(name, kind, mode) as engine:
        assert (bits(engine, LENGTHS) == resident_bits(name, kind)).all()


@pytest.mark.slow
@pytest.mark.parametrize("split, kind", [(True, "q8_0"), (False, "bfloat16")])
def test_several_devices_have_the_bits_of_one(kind, split):
    reader = StoreReader(MODELS["gqa"].with_cache(kind))
    shared = DeviceOptions(split_attention=split)
    engine = make_sharded(reader, local_mesh(3), shared)
    assert (bits(engine, LENGTHS) == resident_bits("gqa", kind)).all()


@pytest.mark.parametrize("name, kind", CASES)
def test_logits_are_near_the_exact_ones_and_are_not_they(name, kind):
    got = resident_bits(name, kind).view(np.float32)
    want = resident_bits(name, "float32").view(np.float32)
    assert 0 < np.abs(got - want).max() < 0.1 * want.std()


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("gqa", "q8_0"), ("mla", "bfloat16")])
def test_xla_attends_to_the_same_values(name, kind, monkeypatch):
    """Also over a long cache, in blocks."""
    want = resident_bits(name, kind).view(np.float32)
    monkeypatch.setattr(native, "is_native", lambda: False)
    engine = ResidentEngine(random_weights(MODELS[name].with_cache(kind)))
    got = bits(engine, LENGTHS).view(np.float32)
    assert np.abs(got - want).max() < 1e-4 * want.std()
    monkeypatch.setattr(cached_attention, "SHORT", 16)
    monkeypatch.setattr(cached_attention, "BLOCK", 8)
    engine = ResidentEngine(random_weights(MODELS[name].with_cache(kind)))
    got = bits(engine, LENGTHS).view(np.float32)
    assert np.abs(got - want).max() < 1e-4 * want.std()


def test_caches_and_budgets_count_what_is_stored():
    sizes = {}
    for kind in CACHE_TYPES:
        config = WIDE.with_cache(kind)
        engine = resident("gqa", kind)
        arrays = [a for each in engine.new_caches(2, 128) for a in each.values()]
        sizes[kind] = cache_bytes(config, 2, 128)
        assert sizes[kind] == sum(a.nbytes for a in arrays)
    rows = 2 * 3 * 128  # of both sequences, heads and positions
    assert sizes["float32"] == rows * (64 + 32) * 4
    assert sizes["bfloat16"] == rows * (64 + 32) * 2
    assert sizes["q8_0"] == rows * 3 * 34
    weights = weight_shapes(StoreReader(WIDE.with_cache("q8_0")))
    records = jax.ShapeDtypeStruct((11, 64), np.float32)
    needs = device_needs(OffloadOptions(), weights, records, 2, 128)
    assert needs.cache == sizes["q8_0"]
    # States are no keys and values.
    states = STATES.with_cache("bfloat16")
    dtypes = [
        {each.dtype for each in kv_cache.cache_arrays(mixer, 1, 8).values()}
        for mixer in states.attentions
    ]
    assert dtypes == [{np.dtype(np.uint16)}, *[{np.dtype(np.float32)}] * 2]


@pytest.mark.slow
def test_rows_and_kept_prompts_have_the_bits_of_a_row_alone(tmp_path):
    kind = "q8_0"
    engine = resident("gqa", kind)
    room = SIZES | {"prompt_cache_bytes": 1 << 20, "max_context": 128}
    first, again = row("a", 40, 5, top_logprobs=2), row("b", 40, 5, top_logprobs=2)
    slots = RowSlots(engine, **room)
    found = run(slots, [(0, first), (2, row("c", 9, 7, top_logprobs=2))])
    want = generate(engine, [first.prompt], 5).tokens[0]
    assert tokens_of(found)["a"] == want
    assert slots.cached_tokens(again.prompt) == 32
    repeated = run(slots, [(0, again)])
    assert (log_probs_of(repeated)["b"] == log_probs_of(found)["a"]).all()
    # In a folder, for the next server of the same type alone.
    assert PromptFiles(tmp_path, {"kv_cache": kind}).save(slots) >= 1
    later = RowSlots(engine, **room)
    assert PromptFiles(tmp_path, {"kv_cache": kind}).load(later) >= 1
    assert later.cached_tokens(again.prompt) == 32
    other = RowSlots(resident("gqa", "float32"), **room)
    assert PromptFiles(tmp_path, {"kv_cache": kind}).load(other) == 0


def test_what_a_type_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="unknown kv_cache 'int3'; known: bfloat16"):
        WIDE.with_cache("int3")
    with pytest.raises(ConfigError, match="blocks of 32.*a k of width 8; use bfloat16"):
        GQA.with_cache("q8_0")
    with pytest.raises(ConfigError, match="fill a latent of width 16; use bfloat16"):
        MLA.with_cache("q8_0")
    assert GQA.with_cache("float32") is GQA


def test_a_budget_says_what_caches_of_a_type_need():
    config = WIDE.with_cache("bfloat16")
    engine = ResidentEngine(random_weights(config))
    engine.kv_limit_bytes = cache_bytes(config, 2, 128)
    engine.new_session(2, 128)
    with pytest.raises(CapacityError, match=f"{cache_bytes(config, 3, 128)}"):
        engine.new_session(3, 128)
