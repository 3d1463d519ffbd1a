"""Delta-nets and short convolutions against sums written out, in float64."""

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model import delta_net
from moe_edge.model.short_conv import causal_conv
from moe_edge.model.state_config import ConvConfig, DeltaConfig

B, S, H, K, V = 2, 150, 3, 20, 14
LENGTHS = (150, 70)  # of each row


def drawn(seed=0):
    """q, k, v, g and beta of both rows, zeros behind their ends, and states."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, S, H, K))
    q, k = (np.maximum(each, -0.2) for each in (q, k))  # as behind silu: they agree
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    v, state = rng.standard_normal((B, S, H, V)), rng.standard_normal((B, H, K, V))
    valid = np.arange(S)[None, :, None] < np.array(LENGTHS)[:, None, None]
    g = np.where(valid, -np.logaddexp(0, 2 * rng.standard_normal((B, S, H))), 0)
    beta = np.where(valid, rng.random((B, S, H)), 0)
    return [each.astype(np.float32) for each in (q, k, v, g, beta, state)]


def written_out(q, k, v, g, beta, state):
    """The recurrence in float64."""
    state, out = state.astype(np.float64), []
    for s in range(q.shape[1]):
        state = state * np.exp(g[:, s].astype(np.float64))[..., None, None]
        known = np.einsum("bhkv,bhk->bhv", state, k[:, s])
        change = beta[:, s, :, None] * (v[:, s] - known)
        state = state + np.einsum("bhk,bhv->bhkv", k[:, s], change)
        out.append(np.einsum("bhkv,bhk->bhv", state, q[:, s]))
    return np.stack(out, axis=1), state


def test_both_forms_are_the_recurrence():
    given = drawn()
    wanted, last = written_out(*given)
    y, state = jax.jit(delta_net.chunked)(*given)
    # Ten times closer than differences of sums from a sub-chunk's beginning come.
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-6)
    step, state = jax.jit(delta_net.step), given[-1]
    for s in range(20):
        y_BHV, state = step(*(each[:, s] for each in given[:-1]), state)
        np.testing.assert_allclose(y_BHV, wanted[:, s], rtol=0, atol=1e-6)


def test_keys_that_agree_cost_no_digits():
    """A token over and over, nothing forgotten, each value taken as it is."""
    q, k, v, g, beta, state = drawn()
    k, g, beta = np.broadcast_to(k[:, :1], k.shape), 0 * g, np.ones_like(beta)
    given = q, k, v, g, beta, state
    wanted, last = written_out(*given)
    y, state = jax.jit(delta_net.chunked)(*given)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=4e-6)
    np.testing.assert_allclose(state, last, rtol=0, atol=4e-6)


def test_short_convolution_leaves_the_window_behind_each_rows_last_token():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 7, 5)), rng.standard_normal((5, 1, 4))
    window = rng.standard_normal((2, 3, 5))
    x, weight, window = (each.astype(np.float32) for each in (x, weight, window))
    valid = np.arange(7)[None] < np.array([[5], [0]])
    y, found = jax.jit(causal_conv)(x, weight, window, valid)
    inputs = np.concatenate([window, x], axis=1)
    wanted = sum(weight[:, 0, tap] * inputs[:, tap : tap + 7] for tap in range(4))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[0], inputs[0, 5:8])
    np.testing.assert_array_equal(found[1], window[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_heads": 5}, "value_heads 5 of a delta-net .* key_heads 2"),
        ({"key_dim": 0}, "key_dim of a delta-net"),
        ({"kernel": 1}, "covers two positions or more, got a kernel of 1"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    sizes = {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}
    with pytest.raises(ConfigError, match=message):
        DeltaConfig(**{**sizes, "kernel": 4, **change})
    with pytest.raises(ConfigError, match="dim of a short convolution"):
        ConvConfig(dim=0, kernel=3)
