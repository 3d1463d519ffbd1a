import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.evict_belady import future_uses
from moe_edge.offload.slot_cache import SlotCache


def least_misses(lookups, slots: int) -> int:
    """Exact minimum over every eviction choice, by search."""
    states = {(): 0}
    for ids in lookups:
        after = {}
        for held, missed in states.items():
            wanted = tuple(sorted(set(held) | set(ids)))
            cost = missed + len(set(ids) - set(held))
            for kept in _subsets(wanted, slots, set(ids)):
                after[kept] = min(after.get(kept, 10**9), cost)
        states = after
    return min(states.values())


def _subsets(items, size, must):
    for mask in range(1 << len(items)):
        kept = tuple(x for i, x in enumerate(items) if mask >> i & 1)
        if len(kept) <= size and must <= set(kept):
            yield kept


def test_belady_reaches_the_least_misses_possible():
    rng = np.random.default_rng(2)
    for _ in range(4):
        lookups = [rng.choice(6, 2, replace=False).tolist() for _ in range(12)]
        steps = np.repeat(np.arange(12), 2)
        future = future_uses(steps, 0 * steps, np.ravel(lookups), 1, 6)
        cache = SlotCache(
            CacheSpec(1, 6, 2, (0,) * 3), get_eviction("belady", future=future)
        )
        missed = 0
        for step, ids in enumerate(lookups):
            misses = cache.look_up(0, np.array([ids], np.int32), None, step).misses
            missed += len(misses)
            for expert in misses:
                cache.admit(0, expert)
        assert missed == least_misses(lookups, 3)


def test_belady_one_pool_compares_layers_within_a_step():
    # Step 1 uses layer 0 expert 0 before layer 1 expert 0.
    future = future_uses([0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], 2, 2)
    policy = get_eviction("belady", future=future)
    cache = SlotCache(CacheSpec(2, 2, 1, (-1, -1)), policy)
    for layer in (0, 1):
        cache.look_up(layer, np.array([[0]], np.int32), None, 0)
        cache.admit(layer, 0)
    cache.release()
    assert cache.admit(0, 1) == 1
    assert cache.slot_LE.tolist() == [[0, 1], [-1, -1]]


def test_future_uses_sorts_any_order():
    future = future_uses([5, 2, 9, 2], [1, 1, 0, 0], [0, 0, 2, 1], 2, 3)
    assert [[uses.tolist() for uses in row] for row in future] == [
        [[], [2], [9]],
        [[2, 5], [], []],
    ]


def test_belady_rejects_missing_or_misshapen_future():
    with pytest.raises(ConfigError, match="belady got no future"):
        get_eviction("belady")
    with pytest.raises(ConfigError, match="must list 2 layers of 3 experts"):
        get_eviction("belady", future=[[[0]] * 3]).init(CacheSpec(2, 3, 1, (-1,)))
