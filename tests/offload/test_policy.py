import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import (
    EVICTIONS,
    CacheSpec,
    check_needs,
    get_eviction,
    put,
)
from tests.support.evictions import eviction_of

L, E, K, S = 3, 10, 2, 12
JITTED = [name for name, kind in EVICTIONS.items() if not kind.host_only]
SPEC = CacheSpec(L, E, K, (-1,) * S)


def random_lookups(steps: int, tokens: int = 2):
    """(step, layer, ids, scores) of `steps` steps; ids are the best scores."""
    rng = np.random.default_rng(3)
    for step in range(steps):
        for layer in range(L):
            scores_TE = rng.random((tokens, E)).astype(np.float32) ** 3
            ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
            if step % 5 == 4:
                ids_TK[-1] = E  # a padded token
            yield step, layer, ids_TK, scores_TE


def drive(policy, state, step, layer, ids_TK, scores_TE, protected_S):
    """Touch, give up one slot, put the first chosen expert there."""
    state = policy.touch(state, layer, ids_TK, scores_TE, step)
    slot, state = policy.victim(state, protected_S)
    key = layer * E + ids_TK[0, 0]
    return slot, put(state, slot, key)


@pytest.mark.parametrize("name", JITTED)
def test_victims_in_jit_match_numpy_without_recompilation(name):
    policy = eviction_of(name, L, E)
    compiled = jax.jit(functools.partial(drive, policy))
    host, device = policy.init(SPEC), policy.init(SPEC, jnp)
    rng = np.random.default_rng(5)
    victims = []
    for step, layer, ids_TK, scores_TE in random_lookups(25):
        protected_S = rng.random(S) < 0.3
        slot, host = drive(policy, host, step, layer, ids_TK, scores_TE, protected_S)
        got, device = compiled(
            device, jnp.int32(step), jnp.int32(layer), ids_TK, scores_TE, protected_S
        )
        assert int(got) == int(slot), (step, layer)
        assert not protected_S[slot]
        victims.append(int(slot))
    assert compiled._cache_size() == 1
    np.testing.assert_array_equal(host["key_S"], device["key_S"])
    assert len(set(victims)) >= 5  # on_demand: five slots are ever in use


@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_victim_any_policy_takes_empty_unprotected_slot_first(name):
    policy = eviction_of(name, L, E)
    state = policy.init(SPEC)
    scores_TE = np.linspace(0.1, 1, E, dtype=np.float32).reshape(1, E)
    state = policy.touch(state, 0, np.array([[1, 2]], np.int32), scores_TE, 0)
    for slot in (0, 1, 5):
        state = put(state, slot, slot)
    protected_S = np.zeros(S, bool)
    protected_S[[2, 3]] = True
    slot, state = policy.victim(state, protected_S)
    assert int(slot) == 4


@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_order_any_policy_is_that_of_its_victims(name):
    policy = eviction_of(name, L, E)
    state, rng = policy.init(SPEC), np.random.default_rng(2)
    for step, layer, ids_TK, scores_TE in random_lookups(8):
        state = policy.touch(state, layer, ids_TK, scores_TE, step)
        for slot in rng.permutation(S)[:2].tolist():
            held = (state["key_S"] == layer * E + ids_TK[0, 0]).any()
            state = state if held else put(state, slot, layer * E + ids_TK[0, 0])
        order, left = policy.order(state).tolist(), np.zeros(S, bool)
        for slot in order:
            copies = {k: np.array(v) for k, v in state.items()}
            assert int(policy.victim(copies, left)[0]) == slot
            left[slot] = True
        assert sorted(order) == list(range(S))


@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_policy_names_itself_its_needs_and_its_source(name):
    policy = eviction_of(name, L, E)
    assert policy.name == name
    assert policy.SOURCE
    assert policy.needs <= {"ids", "weights", "scores", "future", "profile"}
    assert dataclasses.is_dataclass(policy)


def test_put_minus_one_empties_the_slot_and_no_block_is_touched():
    state = get_eviction("lru").init(SPEC)
    state = put(state, 3, 7)
    before_B = state["last_B"][:-1].copy()
    state = put(state, 3, -1)
    assert (state["key_S"] == -1).all()
    np.testing.assert_array_equal(state["last_B"][:-1], before_B)


def test_get_policy_rejects_unknown_name_and_lists_known():
    with pytest.raises(
        ConfigError, match=r"eviction policy 'lry'; did you mean 'lru'. known: b"
    ):
        get_eviction("lry")


def test_get_policy_rejects_unknown_option():
    with pytest.raises(ConfigError, match="lru has no option 'window'; known: none"):
        get_eviction("lru", window=3)


def test_check_needs_rejects_missing_scores():
    check_needs(get_eviction("smoe_score"), ("ids", "scores"))
    with pytest.raises(ConfigError, match="smoe_score needs scores, .*there is: ids"):
        check_needs(get_eviction("smoe_score"), ("ids",))


def test_cache_spec_rejects_layer_out_of_range_and_no_slots():
    with pytest.raises(ConfigError, match=r"layers \[3\] of them unknown.*-1..2"):
        CacheSpec(L, E, K, (0, 3))
    with pytest.raises(ConfigError, match="0 slots"):
        CacheSpec(L, E, K, ())


def test_profiles_and_futures_may_be_any_sequence():
    """gin can give lists only."""
    listed = get_eviction("static_oracle", profile=[[1, 2], [3, 4]])
    state = listed.init(CacheSpec(2, 2, 1, (-1,)))
    assert state["count_B"].tolist() == [1, 2, 3, 4, 0]
    assert get_eviction("belady", future=(((0,), (1,)),)).future == (((0,), (1,)),)
    with pytest.raises(ConfigError, match="static_oracle: profile is 3, expected"):
        get_eviction("static_oracle", profile=3)
