"""Shares of the L1 norm on matrices whose answer is known."""

import numpy as np
import pytest

from moe_edge.papers.moe_prism.studies.sparsity import (
    at_top,
    gated_noise,
    measure,
    share_curves,
)


def test_share_curves_add_up():
    curves = share_curves(np.array([[4.0, 3, 2, 1], [1, 1, 1, 1]]))
    np.testing.assert_allclose(curves[0], [0, 0.4, 0.7, 0.9, 1])
    assert at_top(curves[0]) == pytest.approx(0.4)
    assert at_top(curves[1], 0.5) == pytest.approx(0.5)
    assert at_top(curves[0], 0.375) == pytest.approx(0.55)  # between two neurons


def test_dynamic_and_static_shares_differ_where_tokens_do():
    T, F = 400, 8
    rows = np.zeros((T, F))
    rows[np.arange(T), np.arange(T) % F] = -1.0  # one neuron a token, in turn
    found = measure(rows, np.ones(F))
    assert at_top(found.dynamic_F) == pytest.approx(1.0)
    assert at_top(found.static_F) == pytest.approx(0.25, abs=0.01)
    assert found.mean == pytest.approx(1 / 8)
    assert found.quantiles_Q[1] == 0.0
    # Shuffled, a token has none, one or several active neurons: still few.
    assert at_top(found.shuffled_F) < 0.999
    fixed = np.zeros((T, F))
    fixed[:, 5:7] = 1.0
    same = measure(fixed, np.ones(F))
    assert at_top(same.static_F) == at_top(same.dynamic_F) == pytest.approx(1.0)
    assert same.needed == pytest.approx(2 / 8)  # two neurons reach 90 %


def test_down_norms_weigh_neurons():
    rows = np.ones((10, 4))
    found = measure(rows, np.array([0.0, 0, 3, 1]))
    assert at_top(found.dynamic_F) == pytest.approx(0.25)
    assert at_top(found.dynamic_down_F) == pytest.approx(0.75)


def test_shuffling_keeps_independent_neurons_and_breaks_coactive_ones():
    noise = measure(gated_noise(64), np.ones(64))
    assert at_top(noise.shuffled_F) == pytest.approx(at_top(noise.dynamic_F), abs=0.02)
    assert at_top(noise.static_F) == pytest.approx(0.25, abs=0.02)
    rng = np.random.default_rng(0)
    group = rng.integers(0, 4, 2000)
    rows = np.where(np.arange(16)[None] // 4 == group[:, None], 1.0, 0.01)
    found = measure(rows, np.ones(16))
    assert at_top(found.dynamic_F) > 0.95
    assert at_top(found.shuffled_F) < 0.9


def test_rows_of_zeros_are_left_out():
    rows = np.concatenate([np.ones((6, 4)), np.zeros((2, 4))])
    assert measure(rows, np.ones(4)).mean == 1.0
