import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, get_eviction, put

SPEC = CacheSpec(2, 4, 1, (-1,) * 4)
ONE = np.array([[0]], np.int32)


def scores(*rows):
    return np.array(rows, np.float32)


def test_smoe_score_is_the_mean_of_the_last_n_steps_of_every_expert():
    policy = get_eviction("smoe_score", window=2)
    state = policy.init(SPEC)
    state = policy.touch(state, 1, ONE, scores([0.4, 0.3, 0.2, 0.1]), 0)
    got = state["score_B"].reshape(-1)
    np.testing.assert_allclose(got[:8], [0, 0, 0, 0, 0.4, 0.3, 0.2, 0.1], rtol=1e-6)
    state = policy.touch(state, 1, ONE, scores([0.0, 0.1, 0.3, 0.6]), 1)
    np.testing.assert_allclose(state["score_B"][4:8], [0.2, 0.2, 0.25, 0.35], rtol=1e-6)
    # The first step falls out of the window.
    state = policy.touch(state, 1, ONE, scores([0.8, 0.1, 0.1, 0.0]), 2)
    np.testing.assert_allclose(state["score_B"][4:8], [0.4, 0.1, 0.2, 0.3], rtol=1e-6)
    for slot in range(4):
        state = put(state, slot, 4 + slot)
    slot, _ = policy.victim(state, np.zeros(4, bool))
    assert int(slot) == 1


def test_smoe_score_averages_tokens_and_leaves_padding_out():
    policy = get_eviction("smoe_score", window=2)
    ids_TK = np.array([[0], [1], [4]], np.int32)
    rows = scores([0.6, 0.2, 0.2, 0.0], [0.0, 0.8, 0.0, 0.2], [9, 9, 9, 9])
    state = policy.touch(policy.init(SPEC), 0, ids_TK, rows, 0)
    np.testing.assert_allclose(state["score_B"][:4], [0.3, 0.5, 0.1, 0.1], rtol=1e-6)


def test_smoe_score_keeps_a_high_scored_block_that_lru_gives_up():
    """Block 0 was used long ago but always scores high: the point of equation 3."""
    state, lru_state = (get_eviction(n).init(SPEC) for n in ("smoe_score", "lru"))
    smoe, lru = get_eviction("smoe_score"), get_eviction("lru")
    ids = [0, 1, 2]
    for step, chosen in enumerate(ids):
        row = scores([0.4, 0.1, 0.1, 0.1])
        ids_TK = np.array([[chosen]], np.int32)
        state = put(smoe.touch(state, 0, ids_TK, row, step), chosen, chosen)
        lru_state = put(lru.touch(lru_state, 0, ids_TK, row, step), chosen, chosen)
    protected_S = np.array([False, False, False, True])
    assert int(lru.victim(lru_state, protected_S)[0]) == 0
    assert int(smoe.victim(state, protected_S)[0]) == 1


def test_smoe_score_rejects_an_empty_window():
    with pytest.raises(ConfigError, match="window must be a positive.*got 0"):
        get_eviction("smoe_score", window=0)
