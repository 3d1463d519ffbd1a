"""The cache inside jit does what the host's cache does, and moves what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.offload.evict_base import EVICTIONS, CacheSpec, get_eviction
from moe_edge.offload.evict_lru import Lru
from moe_edge.offload.slot_cache import SlotCache
from tests.support.evictions import eviction_of

L, E, K, R = 3, 11, 2, 64
EQUAL = (0,) * 4 + (2,) * 6  # layer 1 is dense
POOL = (-1,) * 7
IN_JIT = [name for name, cls in EVICTIONS.items() if not cls.host_only]


def look_ups(tokens, steps=40, seed=0):
    """(step, layer, ids_TK, scores_TE); the third look-up of each layer is padding."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        for layer in (0, 2):
            scores_TE = rng.dirichlet(np.ones(E), tokens).astype(np.float32)
            ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
            if step == 2:
                ids_TK[-1] = E
            yield step, layer, ids_TK, scores_TE


def host_records(layer):
    """Row e of layer l holds l * E + e in every element."""
    rows_E1 = np.arange(layer * E, (layer + 1) * E, dtype=np.float32)[:, None]
    return np.tile(rows_E1, (1, R))


@pytest.mark.parametrize(
    "name, layer_S, tokens",
    # Which slots a layer may take is not the policy's: by a single one, and by scores.
    [
        ("lru", EQUAL, 1),
        ("smoe_score", EQUAL, 2),
        *((name, POOL, 2) for name in IN_JIT),
    ],
)
def test_acquire_replayed_on_the_host_agrees(name, layer_S, tokens):
    spec = CacheSpec(L, E, K, layer_S)
    policy = eviction_of(name, L, E)
    device, host = DeviceCache(spec, policy, (0, 2)), SlotCache(spec, policy)
    acquire = jax.jit(device.acquire, donate_argnums=0)
    # Where the arrays are is stated, as by the engine: else it compiles twice.
    cache = jax.device_put(
        device.empty(jnp.zeros((device.spec.num_slots, R))), jax.devices()[0]
    )
    records = {layer: jnp.asarray(host_records(layer)) for layer in (0, 2)}
    counts_L3 = np.zeros((L, 3), int)
    for step, layer, ids_TK, scores_TE in look_ups(tokens):
        cache = cache._replace(step=jax.device_put(np.int32(step), jax.devices()[0]))
        on_host = jax.device_put(records[layer], jax.memory.Space.Host)
        cache, _ = acquire(cache, jnp.int32(layer), ids_TK, scores_TE, on_host)
        found = host.look_up(layer, ids_TK, scores_TE, step)
        before = (host.state["key_S"] >= 0).sum()
        for expert in found.misses:
            assert host.admit(layer, int(expert)) is not None
        grown = (host.state["key_S"] >= 0).sum() - before
        misses = len(found.misses)
        counts_L3[layer] += len(found.hits), misses, misses - grown

        np.testing.assert_array_equal(cache.policy["key_S"], host.state["key_S"])
        slot_LE = np.asarray(cache.slot_N)[:-1].reshape(L, E)
        np.testing.assert_array_equal(slot_LE, host.slot_LE)
        held_S = np.asarray(cache.policy["key_S"])
        slots_S = np.asarray(cache.slots_SR).copy()
        np.testing.assert_array_equal(slots_S[held_S >= 0, 0], held_S[held_S >= 0])
        assert (slots_S == slots_S[:, :1]).all()
    np.testing.assert_array_equal(cache.counts_L3, counts_L3)
    assert counts_L3[0, 1] > 4 and acquire._cache_size() == 1


def test_acquire_that_hits_copies_nothing_of_the_slots():
    spec = CacheSpec(1, E, K, (0,) * 4)
    device = DeviceCache(spec, get_eviction("lru"), (0,))
    acquire = jax.jit(device.acquire, donate_argnums=0, static_argnums=1)
    cache = device.empty(jnp.zeros((device.spec.num_slots, R)))
    host_ER = jnp.asarray(host_records(0))
    place = cache.slots_SR.unsafe_buffer_pointer()
    scores_TE = jnp.ones((1, E), jnp.float32)
    for ids in ([1, 2], [3, 4], [5, 1], [5, 1]):
        ids_TK = jnp.asarray([ids], jnp.int32)
        cache, _ = acquire(cache, 0, ids_TK, scores_TE, host_ER)
        assert cache.slots_SR.unsafe_buffer_pointer() == place
    shape = f"f32[4,{R}]"
    program = acquire.lower(cache, 0, ids_TK, scores_TE, host_ER).compile()
    copies = [x for x in program.as_text().splitlines() if f"= {shape}" in x]
    assert copies and not [x for x in copies if " copy(" in x]


def test_policy_of_the_host_is_refused():
    class Slow(Lru):
        name, host_only = "slow", True

    with pytest.raises(ConfigError, match="'slow' runs on the host only"):
        DeviceCache(CacheSpec(1, E, K, (0,) * 4), Slow(), (0,))


def test_layer_without_slots_is_refused():
    spec = CacheSpec(L, E, K, (0, 0, 2))
    DeviceCache(spec, get_eviction("lru"), (0, 2))
    with pytest.raises(CapacityError, match="layer 1 has 0 of 3 expert slots"):
        DeviceCache(spec, get_eviction("lru"), (0, 1, 2))
