"""Who leaves a pool of bytes: each policy by hand, and their laws."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.coserve.memory.evict_pool import (
    POOL_POLICIES,
    PoolBelady,
    PoolCoServe,
    PoolCoServeQueued,
    PoolFifo,
    PoolLru,
    PoolQueued,
    get_pool_policy,
    next_uses,
)

SIZES = [4, 4, 6, 5, 2]
PROBABILITIES = [0.5, 0.1, 0.2, 0.3, 0.4]
PAIRS = [(0, 2), (1, 3)]  # 2 follows 0, 3 follows 1


def state_of(policy, resident, entered=()):
    state = policy.init(SIZES, PROBABILITIES, PAIRS)
    state["resident_E"][list(resident)] = True
    for number, expert in enumerate(entered):
        state["entered_E"][expert] = number
    return state


def test_lru_takes_the_least_recent_and_of_unused_ones_the_least_probable():
    policy = PoolLru()
    state = state_of(policy, range(5))
    for expert, now_s in ((0, 1.0), (1, 2.0), (0, 3.0)):
        state = policy.touch(state, expert, now_s)
    # 2, 3 and 4 were never used.
    assert policy.victims(state, 21, ()) == [2, 3, 4, 1, 0]
    assert policy.victims(state, 6, ()) == [2]
    assert policy.victims(state, 7, ()) == [2, 3]


def test_fifo_takes_the_order_of_entry():
    policy = PoolFifo()
    state = state_of(policy, [0, 2, 4], entered=[4, 0, 2])
    policy.touch(state, 4, 9.0)
    assert policy.victims(state, 7, ()) == [4, 0, 2]


def test_coserve_takes_orphans_by_size_then_all_by_probability():
    policy = PoolCoServe()
    # Both preliminary experts are away: 2 (6 bytes) before 3 (5), then 4.
    assert policy.victims(state_of(policy, [2, 3, 4]), 12, ()) == [2, 3, 4]
    # 0 is there, so 2 is no orphan: 3 first, then 1? No: 0.2 (2), 0.4 (4), 0.5 (0).
    assert policy.victims(state_of(policy, [0, 2, 3, 4]), 17, ()) == [3, 2, 4, 0]


def test_coserve_queued_spares_what_is_waited_for_in_both_stages():
    policy = PoolCoServeQueued()
    state = state_of(policy, [2, 3, 4])
    assert policy.victims(state, 13, ()) == PoolCoServe().victims(state, 13, ())
    state["waiting_E"][2] = 1  # an orphan, and the largest
    assert policy.victims(state, 13, ()) == [3, 4, 2]
    state["coming_E"][3] = 1  # now both orphans; the largest first
    assert policy.victims(state, 13, ()) == [4, 2, 3]


def test_queued_keeps_what_requests_wait_for_and_what_may_follow():
    policy = PoolQueued()
    state = state_of(policy, range(5))
    state["waiting_E"][1] = 3  # the least probable
    state["coming_E"][2] = 1
    assert policy.victims(state, 21, ()) == [3, 4, 0, 1, 2]


def test_belady_takes_what_is_used_latest():
    policy = PoolBelady([0, 1, 2, 0, 1])
    state = state_of(policy, [0, 1, 2, 4])
    assert policy.victims(state, 3, ()) == [4, 2]  # 4 never
    state = policy.touch(state, 0, 0.0)
    assert policy.victims(state, 12, ()) == [4, 0, 2]
    for expert in (1, 2):
        state = policy.touch(state, expert, 0.0)
    assert policy.victims(state, 7, ()) == [2, 4]  # neither any more


def test_next_uses_by_hand():
    next_T, first_E = next_uses([2, 0, 2], 4)
    assert next_T.tolist() == [2, 3, 3] and first_E.tolist() == [1, 3, 0, 3]


@pytest.mark.parametrize("name", POOL_POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_victims_are_resident_unprotected_enough_and_no_more(name, seed):
    rng = np.random.default_rng(seed)
    policy = POOL_POLICIES[name]()
    sizes = rng.integers(1, 9, 12)
    state = policy.init(sizes, rng.random(12), [(0, 8), (1, 8), (2, 9)])
    state["resident_E"][:] = resident = rng.random(12) < 0.7
    state["waiting_E"][:] = rng.integers(0, 2, 12)
    protected = set(rng.permutation(12)[:3].tolist())
    may = [e for e in np.flatnonzero(resident) if e not in protected]
    for needed in range(1, sizes[may].sum() + 1):
        chosen = policy.victims(state, needed, protected)
        assert set(chosen) <= set(may) and len(set(chosen)) == len(chosen)
        assert sizes[chosen].sum() >= needed > sizes[chosen[:-1]].sum()
    assert policy.victims(state, 0, protected) == []
    with pytest.raises(
        CapacityError, match=f"{sizes[may].sum() + 1} bytes are needed; the {len(may)}"
    ):
        policy.victims(state, sizes[may].sum() + 1, protected)


def test_wrong_input_is_refused():
    with pytest.raises(ConfigError, match="2 sizes, the least 1 bytes, and 3 prob"):
        PoolLru().init([1, 2], [0.1, 0.2, 0.3], [])
    with pytest.raises(ConfigError, match="1 sizes, the least 0 bytes"):
        PoolLru().init([0], [0.1], [])
    with pytest.raises(ConfigError, match="experts 0 to 2, expected 0 to 1"):
        PoolLru().init([1, 1], [0.1, 0.2], [(0, 2)])
    with pytest.raises(ConfigError, match="uses are of experts 0 to 5, expected 0 to"):
        PoolBelady([0, 5]).init([1, 1], [0.1, 0.2], [])
    assert get_pool_policy("queued") == PoolQueued()
    with pytest.raises(ConfigError, match="unknown pool policy 'belady'; known: c"):
        get_pool_policy("belady")
