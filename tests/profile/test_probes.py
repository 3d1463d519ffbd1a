"""Probes name a later layer's experts, of tokens they never saw."""

import numpy as np
import pytest

from moe_edge.profile.probes import fit_probe, values_of

T, D, E, K, NEURONS = 3000, 20, 12, 3, 16


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


def named(probe, x_TD, ids_TK):
    """Recall of the K largest values."""
    values_TE = values_of(probe.rows_EC, probe.neurons_NX, x_TD)
    named_TK = np.argsort(-values_TE, axis=1)[:, :K]
    return (named_TK[:, :, None] == ids_TK[:, None]).sum() / ids_TK.size


def test_planted_choices_are_named_also_of_new_tokens():
    x_PD, place_T, ids_TK = routed(0.0)
    probe = fit_probe(x_PD, place_T, ids_TK, E, NEURONS)
    assert probe.rows_EC.shape == (E, D + 1) and probe.rows_EC.dtype == np.float32
    assert probe.neurons_NX.shape == (NEURONS, 2 * (D + 1) + E)
    assert probe.neurons_NX.dtype == np.float32
    assert probe.recall > 0.9
    assert abs(named(probe, x_PD[place_T], ids_TK) - probe.recall) < 0.03


@pytest.mark.slow
def test_values_say_how_likely_an_expert_is_chosen():
    x_PD, place_T, ids_TK = routed(1.0)
    probe = fit_probe(x_PD, place_T, ids_TK, E, NEURONS)
    values_TE = values_of(probe.rows_EC, probe.neurons_NX, x_PD[place_T])
    share_E = np.bincount(ids_TK.ravel(), minlength=E) / T
    found_E = (1 / (1 + np.exp(-values_TE))).mean(axis=0)
    np.testing.assert_allclose(found_E, share_E, atol=0.02)


def test_neurons_name_what_no_line_can():
    """Expert 0 where two coordinates have one sign, else expert 1."""
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((T, 4)).astype(np.float32)
    ids_TK = (x_TD[:, :1] * x_TD[:, 1:2] < 0).astype(np.int32)
    probe = fit_probe(x_TD, np.arange(T), ids_TK, 2, NEURONS)
    assert probe.recall > 0.9
    lines = probe._replace(neurons_NX=0 * probe.neurons_NX)
    values_TE = values_of(lines.rows_EC, lines.neurons_NX, x_TD)
    assert (values_TE.argmax(axis=1) == ids_TK[:, 0]).mean() < 0.7


@pytest.mark.slow
def test_recall_is_of_tokens_that_were_not_fitted():
    """Random choices: on its own tokens a fit would seem better than chance."""
    rng = np.random.default_rng(1)
    x_TD = rng.standard_normal((400, 150)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(E)[:K] for _ in range(400)]).astype(np.int32)
    probe = fit_probe(x_TD, np.arange(400), ids_TK, E, NEURONS)
    assert probe.recall == pytest.approx(K / E, abs=0.12)
    assert named(probe, x_TD, ids_TK) > 0.5


def test_few_tokens_and_constant_states_give_finite_rows():
    ids_TK = np.tile(np.arange(K, dtype=np.int32), (5, 1))
    x_TD = np.ones((5, D), np.float32)
    probe = fit_probe(x_TD, np.arange(5), ids_TK, E, NEURONS)
    assert np.isfinite(probe.rows_EC).all() and np.isfinite(probe.neurons_NX).all()
    assert probe.recall == 1.0


@pytest.mark.slow
def test_coordinates_that_do_not_vary_get_no_weight():
    """A float32 mean of many equal numbers is not that number."""
    x_PD, place_T, ids_TK = routed(0.0)
    x_PD[:, 3] = 3.7
    probe = fit_probe(x_PD, place_T, ids_TK, E, NEURONS)
    assert np.abs(probe.rows_EC[:, 3]).max() < 1
    assert np.abs(probe.neurons_NX[:, 3]).max() < 5


def test_texts_that_differ_are_named_alike():
    """The second half's states have five times the spread of the first's."""
    rng = np.random.default_rng(2)
    x_TD = rng.standard_normal((4 * 8192, 6)).astype(np.float32)
    x_TD[len(x_TD) // 2 :] *= 5
    ids_TK = np.argsort(-x_TD, axis=1)[:, :2].astype(np.int32)
    probe = fit_probe(x_TD, np.arange(len(x_TD)), ids_TK, 6, NEURONS)
    assert probe.recall > 0.9
