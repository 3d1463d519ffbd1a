import dataclasses
import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import MoeConfig
from moe_edge.model.router import choose
from moe_edge.route.base import get_route

# Two tokens, k = 3, a = 0.2, expert 2 resident.
SCORES = np.array(
    [[0.40, 0.21, 0.20, 0.19, 0.17, 0.03], [0.05, 0.15, 0.14, 0.16, 0.50, 0.30]],
    np.float32,
)
IDS = np.array([[0, 1, 2], [4, 5, 3]], np.int32)
WEIGHTS = np.take_along_axis(SCORES, IDS, axis=1)
RESIDENT = np.arange(6) == 2
MOE = MoeConfig(num_experts=6, top_k=3, expert_dim=4)


def routed(policy, scores_TE=SCORES, ids_TK=IDS, weights_TK=WEIGHTS, here=RESIDENT):
    return policy.route(0, scores_TE, here, MOE, ids_TK, weights_TK)


def test_substitute_batch_of_two_hand_computed():
    """Token 0: s = .19, top from .228: {0}; 1 (.21) is absent and low. 2 (.20) is low
    but resident. Substitutes above .152: 3 is absent, 4 (.17) is in token 1's top set.
    Token 1: s = .15, top from .18: {4, 5}; 3 (.16) is low and absent. Above .12: 1 is
    absent, 2 (.14) is resident.
    """
    ids_TK, weights_TK = routed(get_route("substitute", a=0.2))
    assert ids_TK.tolist() == [[0, 4, 2], [4, 5, 2]]
    np.testing.assert_allclose(weights_TK, [[0.4, 0.17, 0.2], [0.5, 0.3, 0.14]])


def test_substitute_weight_rules_hand_computed():
    _, replaced_TK = routed(get_route("substitute", a=0.2, weights="replaced"))
    np.testing.assert_array_equal(replaced_TK, WEIGHTS)
    # Token 0: .81 before, .77 with own scores; token 1: .96 and .94.
    _, scaled_TK = routed(get_route("substitute", a=0.2, renormalise=True))
    want_TK = np.array([[0.4, 0.17, 0.2], [0.5, 0.3, 0.14]])
    want_TK *= np.array([[0.81 / 0.77], [0.96 / 0.94]])
    np.testing.assert_allclose(scaled_TK, want_TK, rtol=1e-6)
    # The model's own factor a token (normalised weights) applies to a substitute too.
    total_T1 = WEIGHTS.sum(1, keepdims=True)
    _, own_TK = routed(get_route("substitute", a=0.2), weights_TK=WEIGHTS / total_T1)
    np.testing.assert_allclose(own_TK[0], np.array([0.4, 0.17, 0.2]) / 0.81, rtol=1e-6)


def test_substitute_the_k_plus_first_may_serve_and_the_best_absent_stays():
    """One token, s = .20: all of 0, 1, 2 are below .30 and absent; only 3, the
    (k+1)-th, is resident within (.10, .20]: it takes the place of the lowest."""
    scores_TE = np.array([[0.25, 0.22, 0.21, 0.20, 0.1, 0.02]], np.float32)
    ids_TK = np.array([[0, 1, 2]], np.int32)
    here = np.isin(np.arange(6), [3, 4, 5])  # 4 is at (1 - a) s, not above it
    weights_TK = np.take_along_axis(scores_TE, ids_TK, axis=1)
    policy = get_route("substitute", a=0.5)
    ids_TK, _ = routed(policy, scores_TE, ids_TK, weights_TK, here)
    assert ids_TK.tolist() == [[0, 1, 3]]


def by_the_prose(scores_TE, ids_TK, here, a):
    """Section IV-B token by token, with sets: an independent reading."""
    scores_TE, E = scores_TE.astype(np.float64), scores_TE.shape[1]
    tokens = [[e for e in ids if e < E] for ids in ids_TK.tolist()]
    s = [
        max(row[e] for e in range(E) if e not in ids)
        for row, ids in zip(scores_TE, tokens, strict=True)
    ]
    top = [
        {e for e in ids if scores_TE[t, e] >= (1 + a) * s[t]}
        for t, ids in enumerate(tokens)
    ]
    out = []
    for t, ids in enumerate(tokens):
        others = set().union(*(top[u] for u in range(len(tokens)) if u != t))
        there = {e for e in range(E) if here[e]} | others
        absent = [e for e in ids if e not in top[t] and e not in there]
        fits = [e for e in there - set(ids) if scores_TE[t, e] > (1 - a) * s[t]]
        fits.sort(key=lambda e: -scores_TE[t, e])
        count = min(len(absent), len(fits))
        lowest = absent[len(absent) - count :]
        swap = dict(zip(lowest, fits, strict=False))
        out.append([swap.get(e, e) for e in ids_TK[t].tolist()])
    return out


@pytest.mark.parametrize("tokens, a", [(1, 0.5), (3, 0.1), (8, 0.5), (8, 0.9)])
def test_substitute_matches_the_prose_and_holds_its_laws(tokens, a):
    rng = np.random.default_rng(7)
    E, K = 16, 4
    policy, changed = get_route("substitute", a=a), 0
    compiled = jax.jit(functools.partial(policy.route, 0, params=MOE))
    for trial in range(24):
        logits_TE = rng.normal(size=(tokens, E)).astype(np.float32)
        scores_TE = np.exp(logits_TE) / np.exp(logits_TE).sum(1, keepdims=True)
        ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
        if trial % 4 == 0 and tokens > 1:
            ids_TK[-1] = E  # padding
        weights_TK = np.take_along_axis(scores_TE, np.minimum(ids_TK, E - 1), axis=1)
        here = rng.random(E) < 0.3
        args = (scores_TE, here, MOE, ids_TK, weights_TK)
        new_TK, new_weights_TK = policy.route(0, *args)
        assert new_TK.tolist() == by_the_prose(scores_TE, ids_TK, here, a)
        assert new_TK.dtype == np.int32 and new_weights_TK.dtype == np.float32
        for t in range(tokens):
            if ids_TK[t, 0] == E:
                assert (new_TK[t] == E).all()
                continue
            assert len(set(new_TK[t])) == K
            s = np.sort(scores_TE[t])[-K - 1]
            for old, new in zip(ids_TK[t], new_TK[t], strict=True):
                if old == new:
                    continue
                changed += 1
                assert not here[old] and scores_TE[t, old] < (1 + a) * s
                assert (1 - a) * s < scores_TE[t, new] <= s
        got_TK, got_weights_TK = compiled(
            scores_TE=scores_TE, resident_E=here, ids_TK=ids_TK, weights_TK=weights_TK
        )
        np.testing.assert_array_equal(got_TK, new_TK)
        np.testing.assert_allclose(got_weights_TK, new_weights_TK, rtol=1e-6)
    assert changed >= 2
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_topk"])
def test_substitute_zero_a_is_top_k_bit_for_bit(scoring):
    rng = np.random.default_rng(1)
    moe = MoeConfig(
        num_experts=16, top_k=4, expert_dim=4, scoring=scoring, norm_topk=True
    )
    correction_E = None
    if scoring == "sigmoid":
        correction_E = rng.normal(size=16).astype(np.float32)
    logits_TE = rng.normal(size=(64, 16)).astype(np.float32)
    routing = jax.jit(choose, static_argnums=1)(logits_TE, moe, correction_E)
    ids, weights, scores = (np.array(x) for x in routing)
    for here in (np.zeros(16, bool), rng.random(16) < 0.5, np.ones(16, bool)):
        for options in ({"weights": "replaced"}, {}, {"renormalise": True}):
            policy = get_route("substitute", a=0, **options)
            assert policy.lossless
            got = policy.route(0, scores, here, moe, ids, weights)
            np.testing.assert_array_equal(got[0], ids)
            np.testing.assert_array_equal(got[1], weights)
    compiled = jax.jit(lambda *x: policy.route(0, *x[:2], moe, *x[2:]))
    got = compiled(scores, np.zeros(16, bool), ids, weights)
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_array_equal(got[1], weights)


def test_substitute_logit_router_compares_shares():
    """softmax_topk reports logits: negative ones must not turn the thresholds."""
    logits_TE = np.log(SCORES) - 3
    moe = dataclasses.replace(MOE, scoring="softmax_topk")
    weights_TK = WEIGHTS / WEIGHTS.sum(1, keepdims=True)
    policy = get_route("substitute", a=0.2)
    ids_TK, got_TK = policy.route(0, logits_TE, RESIDENT, moe, IDS, weights_TK)
    assert ids_TK.tolist() == [[0, 4, 2], [4, 5, 2]]
    np.testing.assert_allclose(got_TK[0], np.array([0.4, 0.17, 0.2]) / 0.81, rtol=1e-5)


def test_substitute_rejects_bad_options():
    with pytest.raises(ConfigError, match=r"a must lie in \[0, 1\), got 1.0"):
        get_route("substitute", a=1.0)
    with pytest.raises(ConfigError, match=r"a must lie in \[0, 1\), got -0.1"):
        get_route("substitute", a=-0.1)
    with pytest.raises(
        ConfigError, match="unknown weight rule 'mean'; known: own, rep"
    ):
        get_route("substitute", weights="mean")
    assert not get_route("substitute", a=0.1).lossless
