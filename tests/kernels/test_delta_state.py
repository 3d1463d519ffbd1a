"""A GPU's kernels of delta-nets, interpreted, against the forms that XLA compiles."""

import jax
import numpy as np
import pytest
from flax import nnx

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import delta_state, rows
from moe_edge.model import delta_net
from moe_edge.model.delta_net import DeltaNet
from tests.support.tiny_models import STATES

SHAPES = [(4, 20, 14), (3, 33, 80)]  # heads, width of keys and of values


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks of columns, the last one with some behind the end."""
    monkeypatch.setattr(delta_state, "STEP_COLUMNS", 8)
    monkeypatch.setattr(delta_state, "CHUNK_COLUMNS", 16)


def drawn(*leading, K, V, seed=0):
    """q, k, v, g, beta and state of heads; every third one rests."""
    rng = np.random.default_rng(seed)
    N = leading[-1]
    q, k = (rng.standard_normal((2, *leading, K)) / K**0.5).astype(np.float32)
    v = rng.standard_normal((*leading, V)).astype(np.float32)
    g, beta = np.float32(-rng.random(leading)), np.float32(rng.random(leading))
    g[..., ::3] = beta[..., ::3] = 0
    state = rng.standard_normal((N, K, V)).astype(np.float32)
    state[0, 0, 0] = -0.0
    return [q, k, v, g, beta, state]


@pytest.mark.parametrize("shape", SHAPES)
def test_step_is_that_of_xla_and_rest_keeps_its_bits(shape):
    N, K, V = shape
    given = drawn(N, K=K, V=V)
    y, state = jax.device_get(jax.jit(delta_state.step)(*given))
    wanted, after = jax.jit(delta_net.step)(*(each[None] for each in given))
    np.testing.assert_allclose(y, wanted[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(state, after[0], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(
        state[::3].view(np.int32), given[-1][::3].view(np.int32)
    )
    alone = jax.device_get(jax.jit(delta_state.step)(*(each[-1:] for each in given)))
    for found, one in zip((y, state), alone, strict=True):
        np.testing.assert_array_equal(found[-1:], one)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_follow_one_another(shape):
    (N, K, V), M, C = shape, 3, 16
    rng = np.random.default_rng(0)
    widths = V, K, C, K, K  # of values, keys, weights, queries and what is left
    given = [rng.standard_normal((M, N, C, each)) / 8 for each in widths]
    given += [rng.random((M, N)), rng.standard_normal((N, K, V))]
    y, after = jax.jit(delta_state.advance)(
        *(each.astype(np.float32) for each in given)
    )
    *parts, state = given
    for chunk, each in enumerate(zip(*parts, strict=True)):
        values, keys, weights, queries, left, forgets = each
        values = values - keys @ state
        wanted = queries @ state + weights @ values
        np.testing.assert_allclose(y[chunk], wanted, rtol=0, atol=2e-6)
        state = state * forgets[:, None, None] + left.transpose(0, 2, 1) @ values
    np.testing.assert_allclose(after, state, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_layer_takes_them_for_prompts_and_steps(monkeypatch):
    net, rng = DeltaNet(STATES, 1, nnx.Rngs(0)), np.random.default_rng(0)
    width, shapes = STATES.d_model, STATES.attention_of(1).state_shapes(2)
    x_BSD = rng.standard_normal((2, 71, width)).astype(np.float32)
    both_BS = np.ones((2, 70), bool)
    traced = []
    for name in ("step", "advance"):
        kernel = getattr(delta_state, name)
        monkeypatch.setattr(
            delta_state,
            name,
            lambda *given, name=name, kernel=kernel: (
                traced.append(name) or kernel(*given)
            ),
        )

    def run(asked: str):
        monkeypatch.setenv(delta_state.VARIABLE, asked)
        monkeypatch.setattr(rows, "are_wanted", lambda: asked == "1")
        call = jax.jit(lambda *given: net(*given))
        cache = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        y, before = call(x_BSD[:, :70], both_BS, cache)
        last, after = call(x_BSD[:, 70:], np.array([[True], [False]]), before)
        for name, array in after.items():  # the second row rests
            np.testing.assert_array_equal(array[1], before[name][1])
        return jax.device_get([y, last[0], after])

    wanted = run("0")
    assert not traced
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-5),
        run("1"),
        wanted,
    )
    assert traced == ["advance", "step"]


def test_are_taken_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(rows, "are_wanted", lambda: True)
    assert not delta_state.suits()
    monkeypatch.setenv("MOE_EDGE_DELTA_STATE", "1")
    assert delta_state.suits()
    monkeypatch.setattr(rows, "are_wanted", lambda: False)
    assert not delta_state.suits()


def test_refuses_another_value(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_DELTA_STATE", "on")
    with pytest.raises(ConfigError, match="MOE_EDGE_DELTA_STATE.*on"):
        delta_state.suits()
