"""Heads of attention shared by several devices, with their part of the KV cache.

The devices are those that tests/conftest.py asks of JAX: cores of one machine.
"""

import dataclasses
import functools

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.devices import DeviceOptions
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.slots import RowSlots
from moe_edge.engine.split_attention import SplitEngine, check_split, make_sharded
from moe_edge.engine.weights import load_weights
from moe_edge.model import kv_cache
from tests.support.running import SIZES, row, run
from tests.support.sharded import ONE_LAYER, assert_shared, bits
from tests.support.tiny_models import BF16, MLA, RandomReader

# Of 4 heads of k and v four devices have one each, a cache of one row no axis for it;
# of 2 two devices have the same.
ATTENTION = dataclasses.replace(
    ONE_LAYER.attention,
    num_heads=8,
    num_kv_heads=4,
    sinks=True,
    qk_norm="head",
    out_bias=True,
)
CONFIG = dataclasses.replace(ONE_LAYER, attention=ATTENTION)
FEW = dataclasses.replace(ATTENTION, num_kv_heads=2, qkv_bias=True)
FEW = dataclasses.replace(ONE_LAYER, attention=FEW)
# Its matrices in blocks, rows in eights, and a gate beside q.
GATED = {"num_heads": 4, "qkv_bias": False, "output_gate": True}
BLOCKS = dataclasses.replace(
    FEW,
    d_model=64,
    attention=dataclasses.replace(FEW.attention, **GATED),
    moe=dataclasses.replace(FEW.moe, expert_dim=32, expert_kind="q4_0x8"),
    norm_plus_one=True,
)


SPLIT = DeviceOptions(split_attention=True)


@functools.cache
def engine_of(devices: int, config=CONFIG):
    reader = RandomReader(config, dtype=BF16)
    if devices == 1:
        return ResidentEngine(load_weights(reader))
    return make_sharded(reader, local_mesh(devices), SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "config", "lengths", "ks"),
    [(4, FEW, (7,), None), (4, BLOCKS, (7,), None), (2, CONFIG, (5, 9, 5), (3, 1, 2))],
)
def test_logits_are_those_of_one_device(devices, config, lengths, ks):
    """On these kernels bit by bit; others may round products of fewer rows apart."""
    want = bits(engine_of(1, config), lengths, ks).view(np.float32)
    got = bits(engine_of(devices, config), lengths, ks).view(np.float32)
    assert np.abs(got - want).max() <= 1e-5 * want.std()


@pytest.mark.slow
def test_rows_join_and_leave_and_are_kept():
    """Copies between caches of other batches, where a device holds a part of each."""
    first, again = row("a", 40, 6, k=2), row("d", 40, 4, k=2)
    rows = [(0, first), (1, row("b", 9, 7)), (3, row("c", 5, 6, k=1)), (20, again)]
    found = []
    for devices in (1, 4):
        slots = RowSlots(engine_of(devices), **SIZES, prompt_cache_bytes=1 << 20)
        slots.warm_up()
        compiled = slots.num_compiled()
        found.append(repr(run(slots, rows)))
        assert slots.num_compiled() == compiled
        ((k, kept),) = slots.cache.youngest_first()
        assert k == 2 and slots.cached_tokens(again.prompt, 2) == 32
    assert found[0] == found[1]
    # From a file, as `PromptFiles` does, into a server that begins.
    layers = dict(
        enumerate({n: np.asarray(a) for n, a in c.items()} for c in kept.caches)
    )
    later = RowSlots(engine_of(4), **SIZES, prompt_cache_bytes=1 << 20)
    assert later.keep(2, kept.tokens, layers)
    assert repr(run(later, [(0, first)])["a"]) in found[0]
    assert not RowSlots(engine_of(1), **SIZES, prompt_cache_bytes=1 << 20).keep(
        2, kept.tokens, layers
    )


def test_each_device_holds_the_caches_and_rows_of_its_heads():
    engine = engine_of(4)
    assert isinstance(engine, SplitEngine)
    assert_shared(engine.weights, 4)
    for batch, shape in ((1, (64, 8)), (3, (3, 64, 8))):
        for array in engine.new_session(batch, 64).caches[0].values():
            assert [s.data.shape for s in array.addressable_shards] == [shape] * 4
    whole = kv_cache.cache_bytes(ATTENTION, 1, 64)
    assert sum(a.nbytes for a in engine.new_cache(0, 1, 64).values()) == whole
    q = engine.weights.layers[0]["attn.q"]
    assert {shard.data.shape for shard in q.addressable_shards} == {(16, 40)}
    o = engine.weights.layers[0]["attn.o"]
    assert {shard.data.shape for shard in o.addressable_shards} == {(40, 64)}


@pytest.mark.parametrize(
    ("config", "devices", "reason"),
    [
        (MLA, 5, "all heads of latent attention share one cache"),
        (CONFIG, 3, "8 heads cannot be shared equally"),
        (
            dataclasses.replace(
                CONFIG, attention=dataclasses.replace(ATTENTION, num_heads=12)
            ),
            3,
            "4 heads of k and v cannot be shared equally",
        ),
        (
            dataclasses.replace(
                CONFIG, attention=dataclasses.replace(ATTENTION, qk_norm="full")
            ),
            2,
            "a norm of q and k is taken over all heads",
        ),
    ],
)
def test_heads_that_stay_together_are_refused(config, devices, reason):
    with pytest.raises(ConfigError, match=f"{devices} devices: in layer 0 {reason}"):
        check_split(config, devices)


def test_rows_in_eights_of_two_devices_are_refused():
    config = dataclasses.replace(
        BLOCKS, attention=dataclasses.replace(BLOCKS.attention, head_dim=12)
    )
    reader = RandomReader(config, dtype=BF16)
    reason = "rows of k stand in eights, and a device's are no whole ones"
    with pytest.raises(ConfigError, match=f"4 devices: in layer 0 {reason}"):
        check_split(config, 4, reader.dense_kinds)
    check_split(BLOCKS, 4, RandomReader(BLOCKS, dtype=BF16).dense_kinds)


def test_one_device_splits_nothing():
    with pytest.raises(ConfigError, match="and there is one; give devices"):
        DeviceOptions(devices=1, split_attention=True).mesh(RandomReader(BLOCKS), None)
