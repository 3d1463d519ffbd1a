"""Refactored configs, operating points, and gates of blocks against NumPy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.core.checks import ConfigError
from moe_edge.model.layers import activate
from moe_edge.model.proxy_gate import block_ranks, choose_blocks, pattern_counts
from moe_edge.model.router import Router
from moe_edge.model.sub_experts import at_k, split_config
from tests.support.tiny_models import GPT_OSS, GQA

SHARES = ((0.4, 0.3, 0.2, 0.1), (0.3, 0.15, 0.1, 0.05), (0.2, 0.1, 0.05, 0.02))
PROXY = {"gate_neurons": 2}


def test_split_config_counts_blocks():
    moe = split_config(GQA, 4).moe
    assert (moe.num_experts, moe.top_k, moe.expert_dim) == (48, 12, 4)
    assert (moe.num_parents, moe.parent_top_k, moe.max_top_k) == (12, 3, 48)
    proxy = split_config(GQA, 4, gate="proxy_global", **PROXY).moe
    assert proxy.max_top_k == 12
    assert split_config(GQA, 4, gate="calibrated").moe.max_top_k == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"subs": 3}, "16 neurons do not split into 3 .* divisors are 1, 2, 4, 8, 16"),
        ({"subs": 0}, "do not split into 0"),
        (
            {"subs": 4, "gate": "guess"},
            "unknown gate 'guess'; known: calibrated, linear",
        ),
        ({"subs": 4, "gate_neurons": 1}, "need a proxy gate"),
        ({"subs": 4, "gate": "calibrated", "gate_neurons": 1}, "need a proxy gate"),
        ({"subs": 4, "gate": "proxy_global"}, r"gate_neurons must be in 1..4 .* got 0"),
        (
            {"subs": 4, "gate": "proxy_global", "gate_neurons": 2.5},
            r"gate_neurons must be in 1..4 .* got 2.5",
        ),
        (
            {
                "subs": 4,
                "gate": "proxy_pattern",
                "rank_shares": (SHARES[0], SHARES[1], (0.1, 0.1, math.nan, 0.1)),
            }
            | PROXY,
            "finite numbers of at least 0",
        ),
        (
            {"subs": 4, "gate": "proxy_pattern", "rank_shares": SHARES[:2]} | PROXY,
            r"must be 3 rows of 4 numbers, got \(2, 4\)",
        ),
    ],
)
def test_split_config_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(ConfigError, match=message):
        split_config(GQA, **arguments)


def test_split_config_refuses_a_second_split_and_groups_scored_by_two():
    with pytest.raises(ConfigError, match="already, into 2 sub-experts"):
        split_config(split_config(GQA, 2), 2)
    groups = dataclasses.replace(
        GQA.moe, num_groups=2, topk_groups=2, group_score="top2"
    )
    grouped = dataclasses.replace(GQA, moe=groups)
    with pytest.raises(ConfigError, match="two best experts; use a proxy gate"):
        split_config(grouped, 2)
    split_config(grouped, 2, gate="proxy_global", **PROXY)


@pytest.mark.parametrize("k", [0, 13, True, 2.0])
def test_at_k_out_of_range_is_refused(k):
    proxy = split_config(GQA, 4, gate="proxy_global", **PROXY)
    with pytest.raises(ConfigError, match=rf"1..12, got {k!r}"):
        at_k(proxy, k)


def test_at_k_changes_nothing_else():
    config = split_config(GQA, 4)
    assert at_k(config, None) is config
    assert at_k(at_k(config, 5), 12) == config
    assert at_k(config, 5).moe.top_k == 5
    assert at_k(GQA, 12).moe.top_k == 12  # more than its own 3, as far as experts go


@pytest.mark.parametrize(
    ("k", "counts"),
    [(1, (1, 0, 0)), (4, (3, 1, 0)), (7, (4, 2, 1)), (12, (4, 4, 4))],
)
def test_pattern_counts_take_the_largest_shares(k, counts):
    config = split_config(GQA, 4, gate="proxy_pattern", rank_shares=SHARES, **PROXY)
    assert pattern_counts(at_k(config, k).moe) == counts


def test_block_ranks_leave_to_a_smaller_k_what_its_pattern_takes():
    config = split_config(GQA, 4, gate="proxy_pattern", rank_shares=SHARES, **PROXY)
    parent_K = np.repeat(np.arange(3), pattern_counts(config.moe))
    for k in (1, 4, 7, 12):
        kept_K = block_ranks(config.moe) < k
        counts = np.bincount(parent_K[kept_K], minlength=3)
        assert tuple(counts) == pattern_counts(at_k(config, k).moe)


def reference_blocks(parents, weights, levels_PU, moe):
    """One token's (block, weight) pairs, best first, in plain loops."""
    order = [np.argsort(-levels_U, kind="stable") for levels_U in levels_PU]
    if moe.gate == "proxy_pattern":
        chosen = [
            (rank, order[rank][i])
            for rank, count in enumerate(pattern_counts(moe))
            for i in range(count)
        ]
    else:
        chosen = sorted(
            ((r, u) for r in range(len(parents)) for u in range(moe.sub_experts)),
            key=lambda ru: -weights[ru[0]] * levels_PU[ru],
        )[: moe.top_k]
    return [(parents[r] * moe.sub_experts + u, weights[r]) for r, u in chosen]


@pytest.mark.parametrize("gate", ["proxy_pattern", "proxy_global"])
@pytest.mark.parametrize("k", [1, 5])
def test_choose_blocks_equals_plain_loops(gate, k):
    shares = {"rank_shares": SHARES} if gate == "proxy_pattern" else {}
    moe = at_k(split_config(GQA, 4, gate=gate, **shares, **PROXY), k).moe
    rng = np.random.default_rng(3)
    parents = np.stack([rng.permutation(12)[:3] for _ in range(6)]).astype(np.int32)
    weights = np.sort(rng.random((6, 3), np.float32))[:, ::-1].copy()
    levels = rng.random((6, 3, 4), np.float32)
    choose = jax.jit(choose_blocks, static_argnums=3)
    ids, got = map(np.asarray, choose(parents, weights, levels, moe))
    assert ids.dtype == np.int32
    for t in range(6):
        expected = reference_blocks(parents[t], weights[t], levels[t], moe)
        assert ids[t].tolist() == [block for block, _ in expected]
        np.testing.assert_array_equal(got[t], [w for _, w in expected])


@functools.cache
def router_pair(parent, k):
    """A proxy router with everything random, and the parent's with the same rows."""
    config = at_k(split_config(parent, 4, gate="proxy_global", **PROXY), k)
    router, plain = Router(config, nnx.Rngs(0)), Router(parent, nnx.Rngs(0))
    plain.weight = router.weight
    rng = np.random.default_rng(2)
    for name in ("proxy_scale", "proxy_prior", "proxy_gate_bias", "proxy_up_bias"):
        if hasattr(router, name):
            shape = getattr(router, name)[...].shape
            setattr(router, name, nnx.Param(jnp.asarray(rng.random(shape, np.float32))))
    return router, plain


def states(tokens, parent):
    rng = np.random.default_rng(1)
    return rng.standard_normal((tokens, parent.d_model), np.float32)


def levels_of(router, x_D):
    """The levels of all blocks for one token, in NumPy (but for the activation)."""
    moe = router.moe
    part = {
        name: np.asarray(getattr(router, name)[...])
        for name in ("proxy_gate", "proxy_up", "proxy_scale", "proxy_prior")
    }
    gate, up = part["proxy_gate"] @ x_D, part["proxy_up"] @ x_D
    if moe.expert_bias:
        gate = gate + np.asarray(router.proxy_gate_bias[...])
        up = up + np.asarray(router.proxy_up_bias[...])
    out = np.abs(np.asarray(activate(gate, up, moe.activation, moe.swiglu_limit)))
    each = (out * part["proxy_scale"]).reshape(-1, moe.gate_neurons)
    levels = np.maximum(each.sum(axis=1) / moe.gate_neurons + part["proxy_prior"], 0)
    return levels.reshape(-1, moe.sub_experts)


@pytest.mark.parametrize("parent", [GQA, GPT_OSS], ids=["qwen", "gpt_oss"])
@pytest.mark.parametrize("tokens", [3, 11], ids=["gathered", "dense"])
def test_proxy_router_ranks_blocks_by_their_gate_neurons(parent, tokens):
    router, plain = router_pair(parent, 5)
    x_TD = states(tokens, parent)
    routing, expected = jax.jit(lambda x: (router(x), plain(x)))(x_TD)
    routing, expected = jax.device_get((routing, expected))
    for t in range(tokens):
        parents, weights = expected.ids_TK[t], expected.weights_TK[t]
        levels = levels_of(router, x_TD[t])[parents]
        blocks = reference_blocks(parents, weights, levels, router.moe)
        assert routing.ids_TK[t].tolist() == [block for block, _ in blocks]


@pytest.mark.parametrize("parent", [GQA, GPT_OSS], ids=["qwen", "gpt_oss"])
def test_proxy_router_at_full_k_takes_all_blocks_of_the_parents(parent):
    """Scores of a parent's blocks add up to the parent's."""
    router, plain = router_pair(parent, 12)
    x_TD = states(7, parent)
    routing, expected = jax.jit(lambda x: (router(x), plain(x)))(x_TD)
    routing, expected = jax.device_get((routing, expected))
    np.testing.assert_array_equal(
        np.sort(routing.ids_TK // 4), np.repeat(np.sort(expected.ids_TK), 4, axis=1)
    )
    assert all(len(set(row)) == 12 for row in np.asarray(routing.ids_TK).tolist())
    scores = np.asarray(routing.scores_TE).reshape(7, 12, 4)
    whole = expected.scores_TE
    if parent is GPT_OSS:
        scores, whole = np.exp(scores), np.exp(whole)
    np.testing.assert_allclose(scores.sum(axis=-1), whole, rtol=1e-5)
    assert (np.ptp(scores, axis=-1) > 1e-6).sum() == 7 * 3  # the chosen parents'


@pytest.mark.parametrize("parent", [GQA, GPT_OSS], ids=["qwen", "gpt_oss"])
@pytest.mark.parametrize("tokens", [3, 11], ids=["gathered", "dense"])
def test_calibrated_router_ranks_blocks_by_their_rows(parent, tokens):
    config = at_k(split_config(parent, 4, gate="calibrated"), 5)
    router, plain = Router(config, nnx.Rngs(0)), Router(parent, nnx.Rngs(0))
    plain.weight = router.weight
    blocks = config.moe.num_experts
    bias_B = np.random.default_rng(2).random(blocks, np.float32)
    bias_B[0] = 1e4  # whose exponential is infinite
    router.level_bias = nnx.Param(jnp.asarray(bias_B))
    x_TD = states(tokens, parent)
    routing, expected = jax.jit(lambda x: (router(x), plain(x)))(x_TD)
    routing, expected = jax.device_get((routing, expected))
    assert np.isfinite(routing.weights_TK).all()
    logs_TB = x_TD @ np.asarray(router.level_weight[...]).T + bias_B
    levels_TEU = np.exp(np.clip(logs_TB, -60, 60)).reshape(tokens, -1, 4)
    for t in range(tokens):
        parents, weights = expected.ids_TK[t], expected.weights_TK[t]
        chosen = reference_blocks(parents, weights, levels_TEU[t, parents], config.moe)
        assert routing.ids_TK[t].tolist() == [block for block, _ in chosen]
        np.testing.assert_array_equal(routing.weights_TK[t], [w for _, w in chosen])
