"""The kernel of a delta-net's step against float64, whatever the company."""

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

from moe_edge.kernels import native, native_attention
from moe_edge.model.delta_net import DeltaNet
from tests.support.host_kernels import needs_kernels
from tests.support.tiny_models import STATES

pytestmark = needs_kernels
run = jax.jit(native_attention.delta)


def case(N, K, V, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, N, K)) / K**0.5
    v, state = rng.standard_normal((N, V)), rng.standard_normal((N, K, V))
    g, beta = -rng.random(N), rng.random(N)
    g[::3] = beta[::3] = 0  # padding and rows at rest
    state[0, 0, 0] = -0.0
    return [each.astype(np.float32) for each in (q, k, v, g, beta, state)]


def exact(q, k, v, g, beta, state):
    state = state.astype(np.float64) * np.exp(g.astype(np.float64))[:, None, None]
    change = beta[:, None] * (v - np.einsum("nkv,nk->nv", state, k))
    state = state + np.einsum("nk,nv->nkv", k, change)
    return np.einsum("nkv,nk->nv", state, q), state


@pytest.mark.parametrize("shape", [(4, 20, 14), (7, 128, 128), (1, 1, 1), (3, 33, 80)])
def test_step_is_the_recurrence_and_rest_keeps_its_bits(shape):
    given = case(*shape)
    y, state = jax.device_get(run(*given))
    wanted, last = exact(*given)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * max(scale, 1))
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(
        state[::3].view(np.int32), given[-1][::3].view(np.int32)
    )
    alone = jax.device_get(run(*(each[-1:] for each in given)))
    for found, one in zip((y, state), alone, strict=True):
        np.testing.assert_array_equal(found[-1:], one)


def test_a_layers_step_writes_its_states_in_place():
    """No program keeps what was before, for rows that rest: the kernel leaves theirs.

    A select over it made a step of eight rows four times as long.
    """
    net, rows = DeltaNet(STATES, 1, nnx.Rngs(0)), 3
    shape = jax.ShapeDtypeStruct
    cache = {
        name: shape(each, np.float32)
        for name, each in STATES.attention_of(1).state_shapes(rows).items()
    }
    given = shape((rows, 1, STATES.d_model), np.float32), shape((rows, 1), bool), cache
    step = jax.jit(native.within(lambda *all: net(*all)), donate_argnums=2)
    text = step.lower(*given).compile().as_text()
    assert "moe_edge_delta" in text
    size = cache["state"].size
    for dims, operation in re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text):
        if math.prod(map(int, dims.split(","))) == size:
            assert operation in ("parameter", "bitcast", "get-tuple-element"), text


def test_other_instructions_give_the_same_within_rounding():
    given = case(5, 33, 40)
    try:
        found = [
            jax.device_get(run(*given))
            for name in native.INSTRUCTIONS
            if native.use(name)
        ]
    finally:
        native.use(None)
    for y, state in found[1:]:
        np.testing.assert_allclose(y, found[0][0], rtol=0, atol=1e-4)
        np.testing.assert_allclose(state, found[0][1], rtol=0, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, g, beta, state = case(4, 20, 14)
    with pytest.raises(jax.errors.JaxRuntimeError, match="delta: shapes do not fit"):
        jax.block_until_ready(run(q, k, v[:, :3], g, beta, state))
