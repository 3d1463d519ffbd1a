"""Choices with soft borders: shares by hand, all blocks, and nothing elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.model import soft_choice
from moe_edge.model.proxy_gate import choose_blocks
from moe_edge.model.sub_experts import at_k, split_config
from tests.support.tiny_models import GQA

VALUES = np.array([[0.5, 2.0, 1.5, 0.0], [3.0, 1.0, 4.0, 0.5]], np.float32)


def test_shares_are_half_between_the_last_chosen_and_the_next():
    share_TB = np.asarray(soft_choice.soft_shares(VALUES, 2))
    logs_TB = np.log(np.maximum(VALUES, 1e-38))
    border_T1 = np.log([[np.sqrt(1.5 * 0.5)], [np.sqrt(3.0 * 1.0)]])
    with np.errstate(over="ignore"):
        want_TB = 1 / (1 + np.exp(-(logs_TB - border_T1) / soft_choice.WIDTH))
    np.testing.assert_allclose(share_TB, want_TB, rtol=1e-4, atol=1e-6)
    assert ((share_TB > 0.5).sum(axis=1) == 2).all() and share_TB[0, 3] == 0
    assert (soft_choice.soft_shares(VALUES, 4) == 1).all()


def test_a_share_does_not_move_where_all_values_grow_alike():
    def total(factor):
        return (
            jnp.arange(4.0)[None] * soft_choice.soft_shares(factor * VALUES, 2)
        ).sum()

    np.testing.assert_allclose(jax.grad(total)(1.0), 0, atol=1e-5)


@pytest.mark.parametrize("k", [5, 12])
def test_all_blocks_of_the_parents_are_there_and_the_chosen_have_most(k):
    moe = at_k(split_config(GQA, 4, gate="calibrated"), k).moe
    rng = np.random.default_rng(0)
    parents_TP = np.array([[7, 2, 0], [1, 5, 3]], np.int32)
    weights_TP = rng.random((2, 3)).astype(np.float32)
    levels_TPU = rng.random((2, 3, 4)).astype(np.float32)
    given = parents_TP, weights_TP, levels_TPU
    hard_TK, _ = choose_blocks(*given, moe)
    ids_TB, soft_TB = soft_choice.within(lambda *a: choose_blocks(*a, moe))(*given)
    assert hard_TK.shape == (2, k) and ids_TB.shape == (2, 12)
    for t in range(2):
        blocks = [4 * p + u for p in parents_TP[t] for u in range(4)]
        assert ids_TB[t].tolist() == blocks
        share_B = soft_TB[t] / np.repeat(weights_TP[t], 4)
        most = np.asarray(ids_TB[t])[np.argsort(-share_B)[:k]]
        assert set(most.tolist()) == set(np.asarray(hard_TK[t]).tolist())
    if k == 12:
        np.testing.assert_array_equal(soft_TB, np.repeat(weights_TP, 4, axis=1))
