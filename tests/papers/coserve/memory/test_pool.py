"""The account of a pool of bytes."""

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.papers.coserve.memory.evict_pool import POOL_POLICIES, PoolFifo, PoolLru
from moe_edge.papers.coserve.memory.pool import Pool, fill, fill_by_work, make_pools

SIZES = [3, 5, 2, 4]
PROBABILITIES = [0.4, 0.3, 0.2, 0.1]


def test_expert_enters_and_others_leave_for_it():
    pool = Pool(9, PoolLru(), SIZES, PROBABILITIES)
    assert [pool.enter(e) for e in (0, 1)] == [[], []]
    assert 0 in pool and 3 not in pool and pool.free_bytes == 1
    pool.touch(0, 1.0)
    assert pool.enter(2) == [1] and pool.used_bytes == 5
    pool.leave(0)
    assert pool.resident == {2} and pool.used_bytes == 2


def test_protected_expert_stays():
    pool = Pool(9, PoolLru(), SIZES, PROBABILITIES)
    pool.enter(0), pool.enter(1)
    assert pool.enter(2, protected=[1]) == [0]
    # 2 bytes are free, 4 are needed, and nobody else may leave.
    with pytest.raises(CapacityError, match="2 bytes are needed; the 0 experts"):
        pool.enter(3, protected=[1, 2])


@pytest.mark.parametrize("name", POOL_POLICIES)
def test_pool_is_never_above_its_budget(name):
    rng = np.random.default_rng(7)
    uses = rng.integers(0, 20, 300).tolist()
    policy = POOL_POLICIES[name](uses) if name == "belady" else POOL_POLICIES[name]()
    sizes = rng.integers(1, 10, 20)
    pool = Pool(25, policy, sizes, rng.random(20), [(0, 19), (1, 19)])
    for now_s, expert in enumerate(uses):
        if expert not in pool:
            assert expert not in pool.enter(expert)
        pool.touch(expert, now_s)
        assert pool.used_bytes == sizes[list(pool.resident)].sum() <= 25
        assert np.flatnonzero(pool.state["resident_E"]).tolist() == sorted(
            pool.resident
        )


def test_start_goes_round_the_pools_by_probability_until_full():
    pools = make_pools([5, 8], PoolFifo(), SIZES, PROBABILITIES)
    fill(pools, PROBABILITIES)
    # 0 (3 bytes) here, 1 (5) there, 2 (2) here; 3 (4 bytes) fits nowhere.
    assert [pool.resident for pool in pools] == [{0, 2}, {1}]
    pools = make_pools([5, 12], PoolFifo(), SIZES, PROBABILITIES)
    fill(pools, PROBABILITIES)
    assert [pool.resident for pool in pools] == [{0, 2}, {1, 3}]


def test_start_by_work_gives_a_slow_executor_what_is_wanted_less():
    chance = [0.4, 0.3, 0.2, 0.06, 0.04]
    pools = make_pools([3, 2], PoolLru(), [1] * 5, chance)
    fill_by_work(pools, chance, [[1.0] * 5, [10.0] * 5])
    assert [pool.resident for pool in pools] == [{0, 1, 2}, {3, 4}]
    pools = make_pools([3, 2], PoolLru(), [1] * 5, chance)
    fill_by_work(pools, chance, [[1.0] * 5, [1.0] * 5])
    assert [pool.resident for pool in pools] == [{0, 3, 4}, {1, 2}]


def test_pools_share_what_is_coming_and_not_what_waits():
    first, second = make_pools([5, 5], PoolLru(), SIZES, PROBABILITIES)
    first.state["coming_E"][1] += 1
    first.state["waiting_E"][1] += 1
    assert second.state["coming_E"][1] == 1 and second.state["waiting_E"][1] == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(
        CapacityError, match="expert has 5 bytes, the largest pool 4; g"
    ):
        make_pools([4, 3], PoolLru(), SIZES, PROBABILITIES)
    pool = Pool(4, PoolLru(), SIZES, PROBABILITIES)
    assert pool.fits(0) and not pool.fits(1)
    with pytest.raises(CapacityError, match="expert 1 has 5 bytes, the pool 4"):
        pool.enter(1)
    pool.enter(0)
    with pytest.raises(ConfigError, match="expert 0 is in the pool already"):
        pool.enter(0)
    with pytest.raises(ConfigError, match="budget_bytes must be a positive whole"):
        Pool(0, PoolLru(), SIZES, PROBABILITIES)
