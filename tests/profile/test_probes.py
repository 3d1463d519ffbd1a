"""Probes name a later layer's experts better than chance, of tokens they never saw."""

import numpy as np
import pytest

from moe_edge.profile.probes import fit_probe

T, D, E, K = 3000, 20, 12, 3


def routed(noise, seed=0):
    """States between rows of padding, and choices by planted rows of them."""
    rng = np.random.default_rng(seed)
    x_TD = (rng.standard_normal((T, D)) + 3).astype(np.float32)
    router_ED = rng.standard_normal((E, D))
    logits_TE = (x_TD - 3) @ router_ED.T + noise * rng.standard_normal((T, E))
    ids_TK = np.argsort(-logits_TE, axis=1)[:, :K].astype(np.int32)
    x_PD = np.full((2 * T, D), 1e6, np.float32)
    place_T = np.arange(T) * 2 + 1
    x_PD[place_T] = x_TD
    return x_PD, place_T, ids_TK


def test_planted_choices_are_named_also_of_new_tokens():
    x_PD, place_T, ids_TK = routed(0.0)
    probe = fit_probe(x_PD, place_T, ids_TK, E)
    assert probe.rows_EC.shape == (E, D + 1) and probe.rows_EC.dtype == np.float32
    assert probe.recall > 0.8  # a line through what is 0 or 1
    values_TE = x_PD[place_T] @ probe.rows_EC[:, :-1].T + probe.rows_EC[:, -1]
    # Values are shares: over all tokens those of an expert are how often it is chosen.
    share_E = np.bincount(ids_TK.ravel(), minlength=E) / T
    np.testing.assert_allclose(values_TE.mean(axis=0), share_E, atol=1e-3)
    named_TK = np.argsort(-values_TE, axis=1)[:, :K]
    found = (named_TK[:, :, None] == ids_TK[:, None]).sum() / (T * K)
    assert abs(found - probe.recall) < 0.03


def test_recall_is_of_tokens_that_were_not_fitted():
    """Random choices: on its own tokens a fit would seem better than chance."""
    rng = np.random.default_rng(1)
    x_TD = rng.standard_normal((400, 150)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(E)[:K] for _ in range(400)]).astype(np.int32)
    probe = fit_probe(x_TD, np.arange(400), ids_TK, E)
    assert probe.recall == pytest.approx(K / E, abs=0.12)


def test_few_tokens_and_constant_states_give_finite_rows():
    ids_TK = np.tile(np.arange(K, dtype=np.int32), (5, 1))
    probe = fit_probe(np.ones((5, D), np.float32), np.arange(5), ids_TK, E)
    assert np.isfinite(probe.rows_EC).all() and probe.recall == 1.0
