"""Layers whose router, experts and dense MLP have norms and factors of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.model.branches import add_experts
from moe_edge.model.transformer import Block, logits_of, make_chunk
from tests.support.tiny_models import GQA

CONFIG = dataclasses.replace(
    GQA,
    dense_layers=(),
    norm_after=True,
    layer_scale=True,
    moe=dataclasses.replace(
        GQA.moe, own_norms=True, expert_scale=True, norm_topk=True, shared_gate=False
    ),
)
D, T = GQA.d_model, 4


def drawn(block) -> dict[str, np.ndarray]:
    """Gives every vector of a block a random value; returns its parameters by path."""
    rng, found = np.random.default_rng(0), {}
    state = nnx.state(block, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        value = rng.normal(size=leaf.shape).astype(np.float32)
        value = 1 + 0.3 * value if leaf.ndim == 1 else value / leaf.shape[-1] ** 0.5
        leaf[...] = jnp.asarray(value)
        found[".".join(path)] = value.astype(np.float64)
    nnx.update(block, state)
    return found


def unit(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps)


def test_each_part_takes_the_state_by_weights_of_its_own():
    block = Block(CONFIG, 0, nnx.Rngs(0))
    w, rng = drawn(block), np.random.default_rng(1)
    x_BSD, y_TD = rng.normal(size=(2, 1, T, D)).astype(np.float32)
    graph, state = nnx.split(block)

    @jax.jit
    def run(state):
        block = nnx.merge(graph, state)
        start_B, valid_BS = jnp.zeros(1, jnp.int32), jnp.ones((1, T), bool)
        chunk = make_chunk(CONFIG, start_B, valid_BS)
        (x, normed), _ = block.attend(x_BSD, chunk, jnp.int32(9))
        hidden, routing = block.route(normed, chunk)
        shared = block.run_shared(hidden, routing)
        taken = block.expert_input(hidden, routing)
        return x, routing, taken, add_experts(CONFIG, x, y_TD[0], shared)

    x, routing, taken, end = run(state)
    x = np.asarray(x[0], np.float64)
    np.testing.assert_allclose(taken, unit(x) * w["expert_norm"], rtol=1e-4, atol=1e-5)
    logits = (unit(x) * w["router.input_scale"] / np.sqrt(D)) @ w["router.weight"].T
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-scores, -1)[:, :3]
    np.testing.assert_array_equal(routing.ids_TK, ids)
    chosen = np.take_along_axis(scores, ids, -1)
    weights = chosen / chosen.sum(-1, keepdims=True) * w["router.expert_scale"][ids]
    np.testing.assert_allclose(routing.weights_TK, weights, rtol=1e-4)
    mlp_in = unit(x) * w["mlp_norm"]
    gate, up = mlp_in @ w["shared.gate"].T, mlp_in @ w["shared.up"].T
    mlp = (gate / (1 + np.exp(-gate)) * up) @ w["shared.down"].T
    both = unit(y_TD[0]) * w["expert_after_norm"] + unit(mlp) * w["shared_after_norm"]
    want = (x + unit(both) * w["mlp_after_norm"]) * w["layer_scale"]
    np.testing.assert_allclose(end[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cap", [None, 2.5])
def test_logits_are_capped(cap):
    config = dataclasses.replace(CONFIG, logit_cap=cap)
    rng = np.random.default_rng(2)
    x, head = rng.normal(size=(3, D)), rng.normal(size=(GQA.vocab_size, D))
    top = {"final_norm": np.ones(D, np.float32), "head": head.astype(np.float32)}
    got = jax.jit(lambda top, x: logits_of(config, top, x))(top, x.astype(np.float32))
    want = unit(x) @ head.T
    want = want if cap is None else cap * np.tanh(want / cap)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
