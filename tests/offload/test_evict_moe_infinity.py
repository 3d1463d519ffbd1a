import numpy as np

from moe_edge.offload.evict_base import CacheSpec, get_eviction, put
from moe_edge.offload.slot_cache import SlotCache

SPEC = CacheSpec(2, 3, 2, (-1,) * 4)


def filled_state(policy):
    """Blocks (0,0), (0,1), (1,0), (1,2) in slots 0..3; layer 0 used twice."""
    state = policy.init(SPEC)
    for step, layer, ids in ((0, 0, [0, 1]), (0, 1, [0, 2]), (1, 0, [0, 3])):
        state = policy.touch(state, layer, np.array([ids], np.int32), None, step)
        if step == 0:
            for i, expert in enumerate(ids):
                state = put(state, 2 * layer + i, layer * 3 + expert)
    return state


def test_moe_infinity_values_hand_computed():
    """Last lookup in layer 0: decay 1 for layer 0, 1 - 1/3 for layer 1.

    Row of layer 0: 2, 1, 0 of 3 tokens; of layer 1: 1, 0, 1 of 2. Visits 2, 1, 1, 1.
    """
    policy = get_eviction("moe_infinity")
    state = filled_state(policy)
    np.testing.assert_allclose(
        policy.value(state), [2 / 3 * 2, 1 / 3, 1 / 2 * 2 / 3, 1 / 2 * 2 / 3], rtol=1e-6
    )


def test_moe_infinity_visits_start_anew_after_eviction():
    policy = get_eviction("moe_infinity")
    state = filled_state(policy)
    protected_S = np.array([False, True, True, True])
    slot, state = policy.victim(state, protected_S)
    assert int(slot) == 0
    state = put(state, 0, 0)  # the same block comes back, not visited yet
    assert state["visits_B"][0] == 0
    np.testing.assert_allclose(policy.value(state)[0], 2 / 3, rtol=1e-6)


def test_moe_infinity_new_sequence_forgets_the_matrix_and_keeps_the_blocks():
    cache = SlotCache(SPEC, get_eviction("moe_infinity"))
    cache.look_up(1, np.array([[2, 0]], np.int32), None, 0)
    cache.admit(1, 2)
    cache.finish_sequences()
    assert cache.resident(1).tolist() == [False, False, True]
    assert cache.state["tokens_B"].sum() == 0
    assert cache.state["key_S"].tolist() == [5, -1, -1, -1]


def test_moe_infinity_sequences_that_take_turns_keep_their_own_matrices():
    turns, alone = SlotCache(SPEC, get_eviction("moe_infinity")), {}
    rows = {7: [[2, 0]], 9: [[1, 0]]}
    for sequence, ids in rows.items():
        alone[sequence] = SlotCache(SPEC, get_eviction("moe_infinity"))
        for step in range(3):
            alone[sequence].look_up(1, np.array(ids, np.int32), None, step)
    for step in range(3):
        for sequence, ids in rows.items():
            turns.look_up(1, np.array(ids, np.int32), None, step, sequence)
            for expert in ids[0]:
                turns.admit(1, expert)
            expected = alone[sequence].state["tokens_B"] * (step + 1) // 3
            np.testing.assert_array_equal(turns.state["tokens_B"], expected)
    turns.finish_sequences(running=(7,))
    assert turns.resident(1).all(), "blocks are everybody's"
    for sequence, used in ((7, 4), (9, 1)):  # 9 begins again
        turns.look_up(1, np.array(rows[sequence], np.int32), None, 3, sequence)
        assert turns.state["tokens_B"].max() == used


def test_moe_infinity_visits_end_when_another_sequence_evicts_the_block():
    cache = SlotCache(CacheSpec(1, 3, 1, (-1,) * 2), get_eviction("moe_infinity"))

    def use(expert, step, sequence):
        cache.look_up(0, np.array([[expert]], np.int32), None, step, sequence)
        cache.admit(0, expert)

    for step in range(5):
        use(0, step, 7)
    for step, expert in enumerate((1, 2, 1, 2)):
        use(expert, step, 9)
    assert not cache.resident(0)[0]
    use(0, 5, 7)
    assert cache.state["visits_B"][0] == 1, "of this stay in the cache alone"
