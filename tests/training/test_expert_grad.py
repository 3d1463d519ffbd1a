"""The training kernel against the dense form of the same sum."""

import functools

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


def _loss(run):
    def loss(x_TD, weights_TK, experts_ER, ids_TK):
        return (run(x_TD, ids_TK, weights_TK, experts_ER) * jnp.cos(x_TD)).sum()

    return loss


@functools.cache
def _dense(layout, activation, limit):
    """Value and gradients of the dense form, compiled once for all tests."""
    # fori_loop with static bounds is differentiable.
    run = functools.partial(
        run_experts,
        layout=layout,
        activation=activation,
        swiglu_limit=limit,
        method="dense",
    )
    return jax.jit(jax.value_and_grad(_loss(run), argnums=(0, 1, 2)))


@functools.cache
def _ours(kernel):
    run = functools.partial(train_experts, kernel=kernel)
    wanted = (0, 1) if kernel.frozen else (0, 1, 2)
    return jax.jit(jax.value_and_grad(_loss(run), argnums=wanted))


def _case(layout, dtype=np.float32, **ids_options):
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((T, D)).astype(np.float32)
    weights_TK = rng.random((T, K)).astype(np.float32)
    records_ER = rng.standard_normal((E, layout.size)).astype(np.float32).astype(dtype)
    return x_TD, weights_TK, records_ER, _ids(**ids_options)


def _check(kernel, dtype=np.float32, **ids_options):
    """Values and gradients of the kernel and of the dense form agree."""
    layout = kernel.layout
    x_TD, weights_TK, records_ER, ids_TK = _case(layout, dtype, **ids_options)
    got, got_grads = _ours(kernel)(x_TD, weights_TK, to_device(records_ER), ids_TK)
    want, want_grads = _dense(layout, *kernel.activation)(
        x_TD, weights_TK, records_ER.astype(np.float32), ids_TK
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert len(got_grads) == 3 - kernel.frozen
    for ours_g, dense_g in zip(got_grads, want_grads, strict=False):
        used = layout.num_values  # the padding of a record has no gradient
        np.testing.assert_allclose(
            np.asarray(ours_g)[:, :used],
            np.asarray(dense_g)[:, :used],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("one_expert", [False, True])
def test_train_experts_values_and_gradients_match_reference(one_expert):
    _check(Kernel(RecordLayout(D, F)), one_expert=one_expert)


def test_train_experts_with_biases_match_reference():
    _check(Kernel(RecordLayout(D, F, has_bias=True), CLAMPED))


@pytest.mark.parametrize(
    ("has_bias", "activation", "dtype"),
    [(False, SILU, np.float32), (False, GELU, BF16), (True, CLAMPED, BF16)],
)
def test_frozen_experts_values_and_gradients_match_reference(
    has_bias, activation, dtype
):
    _check(Kernel(RecordLayout(D, F, has_bias), activation, frozen=True), dtype)


def test_train_experts_twice_gives_the_same_bits():
    kernel = Kernel(RecordLayout(D, F))
    case = _case(kernel.layout, seed=1)
    first, second = (_ours(kernel)(*case) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_lay_out_every_pair_has_its_own_row_in_a_block_of_its_expert():
    ids_TK, size = _ids(T=300, E=7, K=4, seed=3), 16
    where = jax.jit(lay_out, static_argnums=(1, 2))(ids_TK, 7, size)
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
