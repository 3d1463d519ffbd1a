import numpy as np

from moe_edge.offload.evict_base import CacheSpec, get_eviction, put


def test_lru_orders_layers_within_a_step_and_ties_by_slot():
    """One pool over two layers: layer 1 of a step is later than layer 0."""
    policy = get_eviction("lru")
    state = policy.init(CacheSpec(2, 4, 2, (-1,) * 4))
    free_S = np.zeros(4, bool)
    for layer, slots in ((1, (0, 1)), (0, (2, 3))):
        state = policy.touch(state, layer, np.array([[0, 1]], np.int32), None, 0)
        for expert, slot in enumerate(slots):
            state = put(state, slot, layer * 4 + expert)
    # Refreshed in step 1: layer 1 expert 0, then nothing of layer 0.
    state = policy.touch(state, 1, np.array([[0, 4]], np.int32), None, 1)
    order = []
    for _ in range(4):
        slot, state = policy.victim(state, free_S)
        order.append(int(slot))
        free_S[slot] = True
    # Step 0: layer 0 (slots 2, 3) before layer 1 (slot 1); slot 0 is of step 1.
    assert order == [2, 3, 1, 0]


def test_lru_entering_block_is_later_than_the_hits_of_its_lookup():
    policy = get_eviction("lru")
    state = policy.init(CacheSpec(1, 4, 2, (0, 0)))
    state = policy.touch(state, 0, np.array([[3, 1]], np.int32), None, 0)
    state = put(put(state, 0, 3), 1, 1)
    # Step 1 hits 1; block 2 was prefetched into slot 0 after that lookup.
    state = policy.touch(state, 0, np.array([[1, 4]], np.int32), None, 1)
    state = put(state, 0, 2)
    slot, _ = policy.victim(state, np.zeros(2, bool))
    assert int(slot) == 1
