import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.config import MoeConfig
from moe_edge.route.base import get_route

E, K = 16, 4
MOE = MoeConfig(num_experts=E, top_k=K, expert_dim=4)


def drawn(rng, T):
    """(scores_TE, resident_E, ids_TK, weights_TK) of a router that goes by score."""
    scores_TE = rng.dirichlet(np.full(E, 0.5), T).astype(np.float32)
    ids_TK = np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)
    weights_TK = np.take_along_axis(scores_TE, ids_TK, axis=1)
    return scores_TE, rng.random(E) < 0.4, ids_TK, weights_TK


def test_prefer_hand_computed():
    """With e^.7 = 2.01: 4 (.12) goes before 2 (.20), 5 (.08) not before 1 (.25).
    Expert 1 is token 1's first and so no newcomer's rival there."""
    scores_TE = np.array([[0.30, 0.25, 0.20, 0.05, 0.12, 0.08]], np.float32)
    moe = MoeConfig(num_experts=6, top_k=3, expert_dim=4)
    ids_TK, weights_TK = np.array([[0, 1, 2]], np.int32), scores_TE[:, :3] / 0.75
    here_E = np.isin(np.arange(6), [4, 5])
    prefer = get_route("prefer", bonus=0.7)
    new_TK, new_weights_TK = prefer.route(0, scores_TE, here_E, moe, ids_TK, weights_TK)
    assert new_TK.tolist() == [[0, 1, 4]] and new_TK.dtype == np.int32
    np.testing.assert_allclose(
        new_weights_TK, [[0.3 / 0.75, 0.25 / 0.75, 0.12 / 0.75]], rtol=1e-6
    )
    scaled = get_route("prefer", bonus=0.7, renormalise=True)
    _, scaled_TK = scaled.route(0, scores_TE, here_E, moe, ids_TK, weights_TK)
    np.testing.assert_allclose(scaled_TK.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("T", [1, 3])
def test_prefer_is_the_best_k_by_scores_with_the_bonus(T):
    """Also inside jit; first experts count as resident, and padding stays."""
    prefer, rng = get_route("prefer", bonus=0.7), np.random.default_rng(0)
    in_jit = jax.jit(lambda *given: prefer.route(0, *given[:2], MOE, *given[2:]))
    changed = 0
    for _ in range(50):
        scores_TE, here_E, ids_TK, weights_TK = given = drawn(rng, T)
        new_TK, new_weights_TK = prefer.route(0, *given[:2], MOE, *given[2:])
        counted_E = here_E | np.isin(np.arange(E), ids_TK[:, 0])
        raised_TE = scores_TE * np.where(counted_E, np.exp(0.7), 1)
        best_TK = np.argsort(-raised_TE, axis=1)[:, :K]
        np.testing.assert_array_equal(np.sort(new_TK), np.sort(best_TK))
        assert (new_TK[:, 0] == ids_TK[:, 0]).all()
        own_TK = np.take_along_axis(scores_TE, new_TK, axis=1)
        np.testing.assert_allclose(new_weights_TK, own_TK, rtol=1e-5)
        got = in_jit(*map(jnp.asarray, given))
        np.testing.assert_array_equal(got[0], new_TK)
        np.testing.assert_allclose(got[1], new_weights_TK, rtol=1e-6)
        changed += int((new_TK != ids_TK).sum())
    assert changed > 20 * T
    none_TK = np.full((T, K), E, np.int32), np.zeros((T, K), np.float32)
    got = prefer.route(0, scores_TE, here_E, MOE, *none_TK)
    np.testing.assert_array_equal(got[0], none_TK[0])
    np.testing.assert_array_equal(got[1], none_TK[1])


def test_prefer_without_bonus_and_with_all_resident_changes_nothing():
    rng = np.random.default_rng(1)
    scores_TE, here_E, ids_TK, weights_TK = drawn(rng, 3)
    ids_TK = ids_TK[:, ::-1]  # as a correction bias may order them
    for bonus, resident_E in ((0, here_E), (0.9, np.ones(E, bool))):
        prefer = get_route("prefer", bonus=bonus)
        got = prefer.route(0, scores_TE, resident_E, MOE, ids_TK, weights_TK)
        np.testing.assert_array_equal(got[0], ids_TK)
        np.testing.assert_array_equal(got[1], weights_TK)
    assert get_route("prefer", bonus=0).lossless
    assert not get_route("prefer").lossless


@pytest.mark.parametrize("bonus", [-0.1, float("inf"), float("nan")])
def test_prefer_rejects_a_bonus_that_is_none(bonus):
    with pytest.raises(ConfigError, match="bonus must be a number from 0, got"):
        get_route("prefer", bonus=bonus)
