"""All misses of a layer at once: the results of the loop, miss by miss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.fused_cache import DeviceCache
from moe_edge.engine.fused_lookup import look_up
from moe_edge.kernels import lookup
from moe_edge.offload.evict_base import (
    EVICTIONS,
    CacheSpec,
    Eviction,
    get_eviction,
    own_choice,
)
from tests.support.slow_cases import slow, slow_but

L, E, K, R = 3, 11, 3, 32
MOE_LAYERS = (0, 2)
POOL = (-1,) * 13
LAYERED = (0,) * 5 + (2,) * 5 + (-1,) * 4  # shares, and a pool for all
COUNTS_LE = np.random.default_rng(1).integers(0, 4, (L, E))
OPTIONS = {"static_oracle": {"profile": COUNTS_LE}, "smoe_score": {"window": 3}}
AT_ONCE = [
    name
    for name, kind in EVICTIONS.items()
    if not kind.host_only
    and own_choice(get_eviction(name, **OPTIONS.get(name, {}))) is None
]


def device_of(name, layer_S, experts=E) -> DeviceCache:
    spec = CacheSpec(L, experts, K, layer_S)
    options = OPTIONS.get(name, {})
    return DeviceCache(spec, get_eviction(name, **options), MOE_LAYERS)


def look_ups(tokens, experts, chosen, steps, seed, no_number=False):
    """(step, layer, ids, scores): scores tie, rows repeat experts, some are padding."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        for layer in MOE_LAYERS:
            scores_TE = rng.integers(0, 5, (tokens, experts)).astype(np.float32) / 8
            if step % 3 == 0:
                scores_TE[1:] = scores_TE[0]
            ids_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :chosen]
            ids_TK = ids_TK.astype(np.int32)
            if step % 4 == 1:
                ids_TK[-1, rng.integers(chosen) :] = experts
            if step == 2:
                ids_TK[:] = experts
            if no_number:
                scores_TE[0] = np.nan
            yield step, layer, ids_TK, scores_TE


def check_equal(device, tokens, chosen=K, steps=30, seed=0, no_number=False):
    """Both ways from the same state, after every look-up the same one."""
    spec, experts = device.spec, device.spec.num_experts
    numbers_E1 = jnp.arange(L * experts, dtype=jnp.float32)[:, None]
    records_LER = jnp.tile(numbers_E1, (1, R)).reshape(L, experts, R)
    acquire = jax.jit(device.acquire)
    at_once = jax.jit(lambda *given: look_up(device, *given), static_argnums=1)
    cache, seen = device.empty(jnp.full((spec.num_slots, R), -1.0)), np.zeros(2, int)
    for step, layer, ids_TK, scores_TE in look_ups(
        tokens, experts, chosen, steps, seed, no_number
    ):
        cache = cache._replace(step=jnp.int32(step))
        given = ids_TK, scores_TE
        want, fetched_E = acquire(cache, jnp.int32(layer), *given, records_LER[layer])
        got, rows, _ = jax.tree.map(np.asarray, at_once(cache, layer, *given))
        for name, array in want.policy.items():
            np.testing.assert_array_equal(got.policy[name], array, err_msg=name)
        np.testing.assert_array_equal(got.slot_N[:-1], want.slot_N[:-1])
        np.testing.assert_array_equal(got.counts_L3, want.counts_L3)
        comes_B = rows.host_B >= 0
        assert (np.diff(comes_B.astype(int)) <= 0).all(), "absent ones come first"
        moved_E = np.sort(rows.host_B[comes_B])
        np.testing.assert_array_equal(moved_E, np.flatnonzero(fetched_E))
        slots_SR = np.asarray(cache.slots_SR).copy()
        slots_SR[rows.record_B[comes_B]] = records_LER[layer][rows.host_B[comes_B]]
        np.testing.assert_array_equal(slots_SR, want.slots_SR)
        expert_S = np.append(slots_SR[:, 0] - layer * experts, experts)
        check_rows(rows, ids_TK.reshape(-1), expert_S, experts)
        seen += len(moved_E), len(moved_E) > 1
        cache = want
    assert seen[0] > steps // 2 and seen[1] > 3
    return seen


def check_rows(rows, ids_P, expert_S, experts):
    """Each pair is computed once, from the slot of its expert; padding is not."""
    pair_P = rows.pair_P
    np.testing.assert_array_equal(np.sort(pair_P), np.arange(ids_P.size))
    found_P, slots = np.full(ids_P.size, experts), []
    for slot, row, count in zip(*rows[:3], strict=True):
        here = pair_P[row : row + count]
        assert (found_P[here] == experts).all() and len(here) == count
        found_P[here] = expert_S[slot]
        slots += [slot] if count else []
    np.testing.assert_array_equal(found_P, ids_P)
    assert len(set(slots)) == len(slots), "rows of an expert stand in one block"


@pytest.mark.parametrize("name", slow_but(["hybrimoe", "lru"], AT_ONCE))
def test_several_rows_find_what_the_loop_finds(name):
    check_equal(device_of(name, POOL), 4)


def test_more_pairs_than_the_kernel_takes(monkeypatch):
    monkeypatch.setattr(lookup, "MOST_PAIRS", 11)
    check_equal(device_of("hybrimoe", POOL), 4)


@pytest.mark.parametrize("most_pairs", [*slow(0), lookup.MOST_PAIRS])
def test_scores_that_are_no_numbers_give_each_miss_a_slot_of_its_own(
    most_pairs, monkeypatch
):
    monkeypatch.setattr(lookup, "MOST_PAIRS", most_pairs)
    check_equal(device_of("lru", POOL), 4, no_number=True)


class OwnTime(Eviction):
    """Keeps a time of its own: each look-up is a second."""

    name = "own_time"

    def touch(self, state, layer, ids_TK, scores_TE, step):
        clock = state["clock"] + 2
        last_B = state["last_B"].at[state["key_LE"][layer, ids_TK]].set(clock)
        return {**state, "last_B": last_B, "clock": clock}


@pytest.mark.parametrize("most_pairs", [*slow(0), lookup.MOST_PAIRS])
def test_a_policy_with_a_time_of_its_own(most_pairs, monkeypatch):
    monkeypatch.setattr(lookup, "MOST_PAIRS", most_pairs)
    device = device_of("lru", POOL)
    check_equal(dataclasses.replace(device, policy=OwnTime()), 2)


@pytest.mark.parametrize("name", [*slow("lru"), "smoe_score"])
def test_one_row_finds_what_the_loop_finds(name):
    check_equal(device_of(name, LAYERED), 1)


def test_shares_of_other_layers_are_left_alone():
    check_equal(device_of("lfu", LAYERED), 3, seed=3)


def test_a_layer_evicts_all_that_it_does_not_need():
    # As many slots as rows may choose: experts of a step drive out the others.
    seen = check_equal(device_of("lru", (-1,) * 6), 2)
    assert seen[0] > 60


@pytest.mark.slow
def test_sub_experts_with_thousands_of_slots():
    device = device_of("successor", (-1,) * 1100, experts=512)
    check_equal(device, 2, chosen=32, steps=12)


def test_policies_that_choose_one_by_one_are_known():
    assert own_choice(get_eviction("lru")) is None
    assert own_choice(get_eviction("moe_infinity")) == "gave_up"
    assert len(AT_ONCE) >= 8
