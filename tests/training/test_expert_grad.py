"""The training kernel against the dense form of the same sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.weights import to_device
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.training.expert_grad import (
    WAVE,
    Kernel,
    block_size,
    lay_out,
    train_experts,
)
from tests.support.tiny_models import BF16

D, F, E, K, T = 12, 5, 6, 3, 70
SILU, GELU, CLAMPED = ("silu", None), ("gelu", None), ("clamped_swiglu", 2.0)


def _ids(T=T, E=E, K=K, *, one_expert=False, seed=0):
    if one_expert:
        return np.tile(np.arange(K, dtype=np.int32), (T, 1))
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)


def _check(kernel, dtype=np.float32, **ids_options):
    """Values and gradients of the kernel and of the dense form agree."""
    layout, (activation, limit) = kernel.layout, kernel.activation
    rng = np.random.default_rng(0)
    ids_TK = jnp.array(_ids(**ids_options))
    x_TD = jnp.array(rng.standard_normal((T, D)), jnp.float32)
    weights_TK = jnp.array(rng.random((T, K)), jnp.float32)
    records = rng.standard_normal((E, layout.size)).astype(np.float32).astype(dtype)
    target_TD = jnp.cos(x_TD)

    def dense(x_TD, weights_TK, experts_ER):
        # fori_loop with static bounds is differentiable.
        return run_experts(
            x_TD,
            ids_TK,
            weights_TK,
            experts_ER,
            layout,
            activation=activation,
            swiglu_limit=limit,
            method="dense",
        )

    def ours(x_TD, weights_TK, experts_ER):
        return train_experts(x_TD, ids_TK, weights_TK, experts_ER, kernel)

    def results(run):
        def loss(*args):
            return (run(*args) * target_TD).sum()

        wanted = (0, 1) if kernel.frozen else (0, 1, 2)
        gradients = jax.jit(jax.value_and_grad(loss, argnums=wanted))
        return gradients(x_TD, weights_TK, to_device(records))

    (got, got_grads), (want, want_grads) = results(ours), results(dense)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    for ours_g, dense_g in zip(got_grads, want_grads, strict=True):
        used = layout.num_values  # the padding of a record has no gradient
        np.testing.assert_allclose(
            ours_g[:, :used], dense_g[:, :used], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("one_expert", [False, True])
def test_train_experts_values_and_gradients_match_reference(one_expert):
    _check(Kernel(RecordLayout(D, F)), one_expert=one_expert)


def test_train_experts_with_biases_match_reference():
    _check(Kernel(RecordLayout(D, F, has_bias=True), CLAMPED))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("has_bias", "activation"), [(False, SILU), (False, GELU), (True, CLAMPED)]
)
def test_frozen_experts_values_and_gradients_match_reference(
    has_bias, activation, dtype
):
    _check(Kernel(RecordLayout(D, F, has_bias), activation, frozen=True), dtype)


def test_train_experts_twice_gives_the_same_bits():
    rng = np.random.default_rng(1)
    ids_TK, kernel = jnp.array(_ids(seed=1)), Kernel(RecordLayout(D, F))
    x_TD = jnp.array(rng.standard_normal((T, D)), jnp.float32)
    weights_TK = jnp.array(rng.random((T, K)), jnp.float32)
    experts_ER = jnp.array(rng.standard_normal((E, kernel.layout.size)), jnp.float32)

    @jax.jit
    def gradients(*args):
        return jax.vjp(lambda *a: train_experts(a[0], ids_TK, *a[1:], kernel), *args)[
            1
        ](jnp.cos(x_TD))

    first, second = (gradients(x_TD, weights_TK, experts_ER) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_lay_out_every_pair_has_its_own_row_in_a_block_of_its_expert():
    ids_TK, size = _ids(T=300, E=7, K=4, seed=3), 16
    where = lay_out(jnp.array(ids_TK), 7, size)
    rows = np.asarray(where.row_TK).reshape(-1)
    assert len(set(rows.tolist())) == rows.size
    assert rows.max() < where.waves * WAVE * size <= where.token_NC.size
    np.testing.assert_array_equal(
        np.asarray(where.expert_N)[rows // size], ids_TK.reshape(-1)
    )
    np.testing.assert_array_equal(
        np.asarray(where.token_NC).reshape(-1)[rows], np.repeat(np.arange(300), 4)
    )


def test_block_size_grows_with_the_tokens_of_an_expert():
    assert block_size(64, 64) == 8
    assert block_size(8192 * 8, 64) == 256
