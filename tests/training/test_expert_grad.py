"""The training kernel against the dense form of the same sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.training.expert_grad import block_size, lay_out, train_experts

LAYOUT = RecordLayout(d_model=12, expert_dim=5)


def _inputs(T=70, E=6, K=3, *, one_expert=False, seed=0):
    rng = np.random.default_rng(seed)
    ids_TK = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    if one_expert:
        ids_TK = np.tile(np.arange(K, dtype=np.int32), (T, 1))
    return (
        jnp.array(rng.standard_normal((T, LAYOUT.d_model)), jnp.float32),
        jnp.array(ids_TK),
        jnp.array(rng.random((T, K)), jnp.float32),
        jnp.array(rng.standard_normal((E, LAYOUT.size)), jnp.float32),
    )


@pytest.mark.parametrize("one_expert", [False, True])
def test_train_experts_values_and_gradients_match_reference(one_expert):
    x_TD, ids_TK, weights_TK, experts_ER = _inputs(one_expert=one_expert)
    target_TD = jnp.cos(x_TD)

    def loss(run):
        def value(x_TD, weights_TK, experts_ER):
            return (run(x_TD, weights_TK, experts_ER) * target_TD).sum()

        return jax.value_and_grad(value, argnums=(0, 1, 2))

    def dense(x_TD, weights_TK, experts_ER):
        # fori_loop with static bounds is differentiable.
        return run_experts(x_TD, ids_TK, weights_TK, experts_ER, LAYOUT, method="dense")

    def ours(x_TD, weights_TK, experts_ER):
        return train_experts(x_TD, ids_TK, weights_TK, experts_ER, LAYOUT)

    got, got_grads = jax.jit(loss(ours))(x_TD, weights_TK, experts_ER)
    want, want_grads = jax.jit(loss(dense))(x_TD, weights_TK, experts_ER)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    used = LAYOUT.num_values  # the padding of a record has no gradient
    for ours_g, dense_g in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(
            ours_g[:, :used], dense_g[:, :used], rtol=1e-4, atol=1e-4
        )


def test_lay_out_every_pair_has_its_own_row_in_a_block_of_its_expert():
    _, ids_TK, _, _ = _inputs(T=300, E=7, K=4, seed=3)
    size = 16
    where = lay_out(ids_TK, 7, size)
    rows = np.asarray(where.row_TK).reshape(-1)
    assert len(set(rows.tolist())) == rows.size
    assert rows.max() < where.token_P.shape[0]
    np.testing.assert_array_equal(
        np.asarray(where.expert_N)[rows // size], np.asarray(ids_TK).reshape(-1)
    )
    np.testing.assert_array_equal(
        np.asarray(where.token_P)[rows], np.repeat(np.arange(300), 4)
    )


def test_block_size_grows_with_the_tokens_of_an_expert():
    assert block_size(64, 64) == 8
    assert block_size(8192 * 8, 64) == 256
