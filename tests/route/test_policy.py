import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import ROUTES, get_route, may_act


def test_topk_hands_back_the_model_s_own_arrays():
    policy = get_route("topk")
    ids_TK, weights_TK = np.zeros((2, 3), np.int32), np.ones((2, 3), np.float32)
    got = policy.route(0, None, None, None, ids_TK, weights_TK)
    assert got[0] is ids_TK and got[1] is weights_TK
    assert policy.lossless


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_route_names_itself_and_its_source(name):
    policy = get_route(name)
    assert policy.name == name and policy.SOURCE
    assert policy.lossless == (name == "topk")


STRONG = {"substitute": {"a": 0.9}, "drop": {"threshold": 0.9}, "prefer": {"bonus": 9}}


@pytest.mark.parametrize("name", sorted(set(ROUTES) - {"topk"}))
def test_route_that_acts_on_absent_only_changes_nothing_where_all_are_here(name):
    """So engines need not ask it; one absent expert of one token, and it may act."""
    rng, T, E, K = np.random.default_rng(0), 3, 9, 4
    logits_TE = rng.standard_normal((T, E)).astype(np.float32)
    scores_TE = np.exp(logits_TE) / np.exp(logits_TE).sum(axis=1, keepdims=True)
    ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
    weights_TK = np.take_along_axis(scores_TE, ids_TK, axis=1)
    moe = MoeConfig(num_experts=E, top_k=K, expert_dim=8)
    for rule in ROUTES[name].rules:
        route = get_route(name, **rule, **STRONG[name])
        assert route.acts_on_absent_only
        here_E = np.zeros(E, bool)
        here_E[ids_TK] = True
        padded_TK = np.where(np.arange(K) < K - 1, ids_TK, E).astype(np.int32)
        for given_TK in (ids_TK, padded_TK):
            assert not may_act(route, given_TK, here_E)
            found = route.route(0, scores_TE, here_E, moe, given_TK, weights_TK)
            np.testing.assert_array_equal(found[0], given_TK)
            np.testing.assert_array_equal(found[1], weights_TK)
        here_E[ids_TK[0, 1]] = False
        assert may_act(route, ids_TK, here_E)


def test_get_route_rejects_unknown_name_and_option():
    with pytest.raises(
        ConfigError, match="route policy 'top'; did you mean 'topk'. known"
    ):
        get_route("top")
    with pytest.raises(
        ConfigError, match="substitute has no option 'b'; known: a, wei"
    ):
        get_route("substitute", b=1)
    with pytest.raises(ConfigError, match="topk has no option 'a'; known: none"):
        get_route("topk", a=1)
