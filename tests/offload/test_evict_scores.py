import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import CacheSpec, get_eviction

SPEC = CacheSpec(2, 4, 1, (-1,) * 4)
ONE = np.array([[0]], np.int32)


def scores(*rows):
    return np.array(rows, np.float32)


def test_hybrimoe_decays_and_adds_the_top_two_k_scores():
    policy = get_eviction("hybrimoe")
    state = policy.touch(policy.init(SPEC), 0, ONE, scores([0.4, 0.3, 0.2, 0.1]), 0)
    np.testing.assert_allclose(state["score_B"][:4], [0.2, 0.15, 0, 0], rtol=1e-6)
    state = policy.touch(state, 0, ONE, scores([0.1, 0.0, 0.5, 0.3]), 1)
    np.testing.assert_allclose(
        state["score_B"][:4], [0.1, 0.075, 0.25, 0.15], rtol=1e-6
    )


def test_hybrimoe_keeps_all_scores_where_two_k_exceeds_the_experts():
    policy = get_eviction("hybrimoe")
    ids_TK = np.array([[0, 1, 2]], np.int32)
    row = scores([0.4, 0.3, 0.2, 0.1])
    state = policy.touch(policy.init(SPEC), 0, ids_TK, row, 0)
    np.testing.assert_allclose(state["score_B"][:4], row[0] / 2, rtol=1e-6)


def test_hybrimoe_rejects_a_mix_of_nothing():
    with pytest.raises(ConfigError, match=r"mix must lie in \(0, 1\], got 0"):
        get_eviction("hybrimoe", mix=0)
