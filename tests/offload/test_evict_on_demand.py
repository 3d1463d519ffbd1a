import numpy as np

from moe_edge.offload.evict_base import CacheSpec, get_eviction
from moe_edge.offload.slot_cache import SlotCache


def test_on_demand_same_block_next_step_misses_again():
    cache = SlotCache(CacheSpec(1, 4, 2, (0,) * 4), get_eviction("on_demand"))
    ids_TK = np.array([[1, 2]], np.int32)
    for step in range(3):
        found = cache.look_up(0, ids_TK, None, step)
        assert found.hits == []
        assert found.misses == [1, 2]
        assert [cache.admit(0, expert) for expert in (1, 2)] == [0, 1]
        assert cache.resident(0).tolist() == [False, True, True, False]


def test_on_demand_prefetched_block_is_a_hit_once():
    cache = SlotCache(CacheSpec(2, 4, 2, (-1,) * 4), get_eviction("on_demand"))
    cache.look_up(0, np.array([[1]], np.int32), None, 0)
    cache.admit(0, 1)
    cache.admit(1, 3)  # prefetched for the next layer
    assert cache.look_up(1, np.array([[3]], np.int32), None, 0).hits == [3]
    assert not cache.resident(0).any()
    assert cache.look_up(1, np.array([[3]], np.int32), None, 1).misses == [3]
