import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import get_route

MOE = MoeConfig(num_experts=6, top_k=3, expert_dim=4)
SCORES = np.zeros((3, 6), np.float32)  # not read
IDS = np.array([[0, 1, 2], [3, 0, 5], [6, 6, 6]], np.int32)
WEIGHTS = np.array([[0.5, 0.3, 0.2], [1.0, 0.9, 0.1], [0, 0, 0]], np.float32)
RESIDENT = np.isin(np.arange(6), [1])


def test_drop_hand_computed():
    """Threshold .25: of sum 1, 2 (.2) goes, 1 (.3) is resident anyway; of sum 2, below
    .5 is 5 (.1) only. The first expert stays whatever its weight; padding is left."""
    policy = get_route("drop", threshold=0.25, renormalise=False)
    ids_TK, weights_TK = policy.route(0, SCORES, RESIDENT, MOE, IDS, WEIGHTS)
    assert ids_TK.tolist() == [[0, 1, 6], [3, 0, 6], [6, 6, 6]]
    want_TK = np.array([[0.5, 0.3, 0], [1.0, 0.9, 0], [0, 0, 0]], np.float32)
    np.testing.assert_array_equal(weights_TK, want_TK)
    policy = get_route("drop", threshold=0.25)
    ids_TK, weights_TK = policy.route(0, SCORES, RESIDENT, MOE, IDS, WEIGHTS)
    scale_T1 = np.array([[1 / 0.8], [2 / 1.9], [1]])
    np.testing.assert_allclose(weights_TK, want_TK * scale_T1, rtol=1e-6)


def test_drop_first_expert_stays_above_every_threshold():
    policy = get_route("drop", threshold=0.9)
    ids_TK, weights_TK = policy.route(0, SCORES, RESIDENT, MOE, IDS[:1], WEIGHTS[:1])
    assert ids_TK.tolist() == [[0, 1, 6]]
    assert ids_TK.dtype == np.int32 and weights_TK.dtype == np.float32


def test_drop_zero_threshold_and_full_residency_are_bit_equal():
    for threshold, here in ((0, RESIDENT), (0.9, np.ones(6, bool))):
        policy = get_route("drop", threshold=threshold)
        ids_TK, weights_TK = policy.route(0, SCORES, here, MOE, IDS, WEIGHTS)
        np.testing.assert_array_equal(ids_TK, IDS)
        np.testing.assert_array_equal(weights_TK, WEIGHTS)
    assert get_route("drop", threshold=0).lossless
    assert not get_route("drop", threshold=0.1).lossless


def test_drop_in_jit_matches_numpy():
    policy = get_route("drop", threshold=0.25)
    want = policy.route(0, SCORES, RESIDENT, MOE, IDS, WEIGHTS)
    route = jax.jit(lambda *x: policy.route(0, *x[:2], MOE, *x[2:]))
    got = route(*(jnp.asarray(x) for x in (SCORES, RESIDENT, IDS, WEIGHTS)))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


def test_drop_rejects_threshold_out_of_range():
    with pytest.raises(ConfigError, match=r"threshold must lie in \[0, 1\), got 1"):
        get_route("drop", threshold=1)
