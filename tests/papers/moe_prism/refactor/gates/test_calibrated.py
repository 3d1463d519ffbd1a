"""Rows that predict norms: planted ones are found, and few or odd tokens do no harm."""

import numpy as np

from moe_edge.convert.refactored_router import LevelRows, level_tensors
from moe_edge.papers.moe_prism.refactor.gates.calibrated import fit_rows, flat_rows

T, D, U = 1200, 24, 4


def planted(noise=0.3, seed=0):
    """Inputs, and norms whose logarithms are linear in them but for noise."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((T, D)) + rng.standard_normal(D)
    weight_UD = rng.standard_normal((U, D)) / D**0.5
    logs_TU = x_TD @ weight_UD.T + np.arange(U) + noise * rng.standard_normal((T, U))
    return x_TD.astype(np.float16), np.exp(logs_TU).astype(np.float32), weight_UD


def test_planted_rows_are_found():
    x_TD, norms_TU, weight_UD = planted()
    rows = fit_rows(x_TD, norms_TU)
    assert rows.weight_UD.dtype == rows.bias_U.dtype == np.float32
    np.testing.assert_allclose(rows.weight_UD, weight_UD, atol=0.05)
    levels_TU = rows.levels(x_TD.astype(np.float32))
    # A mean, though logarithms were fitted, whose mean is that of a median.
    np.testing.assert_allclose(levels_TU.mean(axis=0), norms_TU.mean(axis=0), rtol=1e-3)
    agree = (levels_TU.argmax(axis=1) == norms_TU.argmax(axis=1)).mean()
    assert agree > 0.8


def test_more_coordinates_than_tokens_are_held_down():
    """Noise is not learned: predictions of other tokens hardly vary."""
    rng = np.random.default_rng(1)
    x_TD = rng.standard_normal((60, 200)).astype(np.float16)
    norms_TU = np.exp(rng.standard_normal((60, U))).astype(np.float32)
    rows = fit_rows(x_TD, norms_TU)
    other_TD = rng.standard_normal((500, 200)).astype(np.float32)
    spread_U = np.log(rows.levels(other_TD)).std(axis=0)
    assert (spread_U < 0.5).all()  # of norms, whose logarithms have a spread of 1


def test_silent_blocks_one_token_and_constant_inputs_give_finite_rows():
    x_TD, norms_TU, _ = planted()
    norms_TU[:, 1] = 0.0
    norms_TU[::2, 2] = 0.0
    for tokens in (1, 3, T):
        rows = fit_rows(x_TD[:tokens], norms_TU[:tokens])
        assert np.isfinite(rows.weight_UD).all() and np.isfinite(rows.bias_U).all()
    levels_TU = rows.levels(x_TD.astype(np.float32))
    assert (levels_TU[:, 1] < 1e-3 * levels_TU[:, 0]).all()
    rows = fit_rows(np.ones((50, D), np.float16), norms_TU[:50])
    assert np.isfinite(rows.levels(np.ones((1, D), np.float32))).all()


def test_flat_rows_and_tensors_stand_block_by_block():
    flat = flat_rows(np.array([1.0, 2.0, 0.0]), 5)
    levels_TU = flat.levels(np.ones((2, 5), np.float32))
    np.testing.assert_allclose(levels_TU[:, :2], [[1, 2], [1, 2]], rtol=1e-6)
    assert (levels_TU[:, 2] < 1e-30).all()
    other = LevelRows(np.ones((3, 5), np.float32), np.zeros(3, np.float32))
    tensors = level_tensors([flat, other], np.dtype(np.float16))
    assert tensors["router.level_weight"].dtype == np.float16
    np.testing.assert_array_equal(tensors["router.level_weight"][3:], other.weight_UD)
    np.testing.assert_array_equal(tensors["router.level_bias"][:3], flat.bias_U)
