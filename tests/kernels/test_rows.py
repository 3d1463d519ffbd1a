"""Steps of a row on a GPU, interpreted: places of the best, rows of any width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.kernels import rows
from moe_edge.model.layers import add_norm, norm, rms_norm


@pytest.mark.parametrize("width", [1, 5, 64])
def test_each_row_is_called_with_its_own_and_with_the_shared_values(width):
    random = np.random.default_rng(0)
    x_TD = random.normal(size=(3, width)).astype(np.float32)
    scale_1D = random.normal(size=(1, width)).astype(np.float32)

    def run(x, scale):
        total = jnp.sum(x, axis=1, keepdims=True)
        return x * scale, total.astype(jnp.int32)

    given = (jnp.asarray(x_TD), 0.0), (jnp.asarray(scale_1D), 0.0)
    kinds = (width, jnp.float32), (1, jnp.int32)
    product_TD, total_T1 = rows.per_row(run, given, kinds)
    np.testing.assert_array_equal(product_TD, x_TD * scale_1D)
    np.testing.assert_allclose(total_T1, x_TD.sum(1, keepdims=True).astype(int), atol=1)


@pytest.mark.parametrize("width, k", [(8, 3), (12, 3), (32, 8), (16, 16)])
def test_pick_takes_what_top_k_takes(width, k):
    random = np.random.default_rng(width)
    # Whole numbers: many ties. Some rows are all -inf but for fewer than k.
    choice_TE = random.integers(0, 5, (20, width)).astype(np.float32)
    choice_TE[10:][random.random((10, width)) < 0.8] = -np.inf
    values_TE = random.normal(size=choice_TE.shape).astype(np.float32)

    def run(choice, values):
        return rows.pick(choice, values, k)

    given = (jnp.asarray(choice_TE), -jnp.inf), (jnp.asarray(values_TE), 0.0)
    places_TK, found_TK = rows.per_row(run, given, [(k, jnp.int32), (k, jnp.float32)])
    want_TK = jax.lax.top_k(choice_TE, k)[1]
    np.testing.assert_array_equal(places_TK, want_TK)
    np.testing.assert_array_equal(found_TK, np.take_along_axis(values_TE, want_TK, 1))


def test_norm_is_that_of_xla(monkeypatch):
    x = np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)
    weight_D = np.linspace(0.5, 2, 40, dtype=np.float32)
    want = rms_norm(jnp.asarray(x), jnp.asarray(weight_D), 1e-5)
    monkeypatch.setattr(rows, "are_wanted", lambda: True)
    found = rms_norm(jnp.asarray(x), jnp.asarray(weight_D), 1e-5)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    np.testing.assert_array_equal(
        rms_norm(jnp.asarray(x[:1, :1]), jnp.asarray(weight_D), 1e-5), found[:1, :1]
    )


@pytest.mark.parametrize("way", ["native", "XLA", "one kernel"])
def test_layer_norm_is_that_of_numpy(way, monkeypatch):
    random = np.random.default_rng(0)
    x = (3 + 2 * random.normal(size=(2, 3, 40))).astype(np.float32)
    scale_D, bias_D = random.normal(size=(2, 40)).astype(np.float32)
    monkeypatch.setattr(rows, "are_wanted", lambda: way == "one kernel")
    monkeypatch.setenv("MOE_EDGE_KERNELS", "native" if way == "native" else "xla")
    given = *map(jnp.asarray, (x, scale_D, bias_D)), 1e-3
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale_D + bias_D
    np.testing.assert_allclose(norm(*given), want, rtol=2e-5, atol=2e-6)


def test_sum_and_norm_by_one_kernel_are_those_of_two(monkeypatch):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 2, 3, 40)).astype(np.float32)
    given = jnp.asarray(x), jnp.asarray(y), jnp.linspace(0.5, 2, 40), 1e-5
    monkeypatch.setattr(rows, "are_wanted", lambda: True)
    want = add_norm(*given)
    monkeypatch.setenv("MOE_EDGE_DECODE_ATTENTION", "1")
    calls, per_row = [], rows.per_row
    monkeypatch.setattr(rows, "per_row", lambda *all: calls.append(1) or per_row(*all))
    found = add_norm(*given)
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_array_equal(found[1], want[1])
    assert len(calls) == 1
