"""Gradients of the host kernels: against float64, and the order of their sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_edge.kernels import gradients, native
from moe_edge.model.attention import Attention
from moe_edge.model.config import RopeConfig
from moe_edge.model.matvec import linear
from moe_edge.model.record import RecordLayout
from moe_edge.model.rope import rope_tables
from moe_edge.training.expert_grad import expert_fn
from tests.support.host_kernels import needs_kernels, stored
from tests.support.slow_cases import slow
from tests.support.tiny_models import GQA

pytestmark = needs_kernels
E = 7


def assert_close(got, want):
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * scale)


@functools.cache
def vjp_of(run):
    """Values and gradients of a function for a given gradient of its result."""

    def back(dy, *args):
        y, pull = jax.vjp(run, *args)
        return y, pull(dy)

    return jax.jit(back)


@pytest.mark.parametrize(
    "tokens, width, outputs",
    [(1, 16, 1), (5, 48, 7), (130, 192, 64), (1024, 64, 300), (49, 208, 97)],
)
def test_gradients_of_a_product(tokens, width, outputs):
    rng = np.random.default_rng(width)
    x, w, dy = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((tokens, width), (outputs, width), (tokens, outputs))
    )
    run = vjp_of(gradients.product)
    y, (dx, dw) = run(dy, x, w)
    exact_x, exact_w, exact_dy = (a.astype(np.float64) for a in (x, w, dy))
    assert_close(y, exact_x @ exact_w.T)
    assert_close(dx, exact_dy @ exact_w)
    assert_close(dw, exact_dy.T @ exact_x)
    for threads in (1, 3):
        native.resize(threads)
        _, again = run(dy, x, w)
        assert (again[0] == dx).all() and (again[1] == dw).all()


def case(layout, tokens, chosen=3, seed=0, unused=(2,)):
    """Arguments of `experts`: some ids are no experts, some experts have no tokens."""
    rng = np.random.default_rng(seed)
    known = [e for e in range(E + 2) if e not in unused]
    ids_TK = np.stack([rng.permutation(known)[:chosen] for _ in range(tokens)])
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    weights_TK = rng.random((tokens, chosen)).astype(np.float32)
    records_ER = (0.3 * rng.normal(size=(E, layout.size))).astype(np.float32)
    dy_TD = rng.normal(size=x_TD.shape).astype(np.float32)
    return dy_TD, (x_TD, ids_TK.astype(np.int32), weights_TK, records_ER)


def exact(layout, dy_TD, x_TD, ids_TK, weights_TK, records_ER):
    """Value and gradients in float64, expert by expert."""
    x, w, dy = (a.astype(np.float64) for a in (x_TD, weights_TK, dy_TD))
    y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
    drecords = np.zeros(records_ER.shape)
    for e, record_R in enumerate(records_ER.astype(np.float64)):
        gate, up, down = (layout.part(record_R, n) for n in ("gate", "up", "down"))
        t, k = np.nonzero(ids_TK == e)
        g, u = x[t] @ gate.T, x[t] @ up.T
        share = 1 / (1 + np.exp(-g))
        hidden, each = g * share * u, w[t, k][:, None]
        out = hidden @ down.T
        np.add.at(y, t, each * out)
        dw[t, k] = (dy[t] * out).sum(axis=1)
        dsum = each * dy[t]
        dhidden = dsum @ down
        dgate = dhidden * u * share * (1 + g * (1 - share))
        dup = dhidden * g * share
        np.add.at(dx, t, dgate @ gate + dup @ up)
        for name, part in (
            ("gate", dgate.T @ x[t]),
            ("up", dup.T @ x[t]),
            ("down", dsum.T @ hidden),
        ):
            layout.part(drecords[e], name)[...] = part
    return y, dx, dw, drecords


@functools.cache
def experts_vjp(layout):
    def run(ids_TK, x_TD, weights_TK, records_ER):
        given = x_TD, ids_TK, weights_TK, records_ER
        return gradients.experts(*given, layout.expert_dim)

    def back(dy_TD, x_TD, ids_TK, weights_TK, records_ER):
        bound = functools.partial(run, ids_TK)
        y_TD, pull = jax.vjp(bound, x_TD, weights_TK, records_ER)
        return y_TD, *pull(dy_TD)

    return jax.jit(back)


@pytest.mark.parametrize(
    "layout, tokens",
    [
        ((16, 16), 1),
        ((48, 32), 17),
        ((192, 64), 300),
        ((64, 208), 130),
        ((32, 16), 900),
    ],
)
def test_gradients_of_experts(layout, tokens):
    layout = RecordLayout(*layout)
    dy_TD, given = case(layout, tokens)
    run = experts_vjp(layout)
    found = run(dy_TD, *given)
    for got, want in zip(found, exact(layout, dy_TD, *given), strict=True):
        assert_close(got, want)
    assert not np.asarray(found[3])[2].any()  # whom nobody chose
    assert not np.asarray(found[3])[:, layout.num_values :].any()
    for threads in (1, 3):
        native.resize(threads)
        again = run(dy_TD, *given)
        assert all((a == b).all() for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_frozen_records_may_be_stored_shorter(dtype):
    layout = RecordLayout(48, 32)
    dy_TD, (x_TD, ids_TK, weights_TK, records_ER) = case(layout, 130)
    records_ER, exact_ER = stored(records_ER, dtype)

    def back(dy_TD, x_TD, weights_TK):
        def run(x_TD, weights_TK):
            given = x_TD, ids_TK, weights_TK, records_ER
            return gradients.experts(*given, layout.expert_dim, frozen=True)

        y_TD, pull = jax.vjp(run, x_TD, weights_TK)
        return y_TD, *pull(dy_TD)

    found = jax.jit(back)(dy_TD, x_TD, weights_TK)
    want = exact(layout, dy_TD, x_TD, ids_TK, weights_TK, exact_ER)
    for got, one in zip(found, want, strict=False):
        assert_close(got, one)


@pytest.mark.parametrize("instructions", native.INSTRUCTIONS)
def test_gradients_of_every_instruction_set(instructions):
    layout = RecordLayout(48, 80)
    dy_TD, given = case(layout, 150)
    if not native.use(instructions):
        pytest.skip(f"this processor has no {instructions}")
    heads = [np.float32(a) for a in attention_case(4, 2, 77, 48)]
    window, scale = np.int32(50), 0.2
    try:
        y, attended = vjp_of(functools.partial(attend, window, scale))(*heads)
        found = experts_vjp(layout)(dy_TD, *given)
        dense = vjp_of(gradients.product)(dy_TD[:, :7], given[0], dy_TD[:7])
    finally:
        native.use(None)
    want_attended = exact_attention(*heads[1:], window, scale, heads[0])
    for got, want in zip((y, *attended), want_attended, strict=True):
        assert_close(got, want)
    for got, want in zip(found, exact(layout, dy_TD, *given), strict=True):
        assert_close(got, want)
    assert_close(dense[1][1], dy_TD[:, :7].astype(np.float64).T @ given[0])


def test_all_tokens_to_one_expert_and_none_to_any():
    layout = RecordLayout(32, 32)
    for ids in (np.full((70, 1), 4), np.full((70, 1), E)):
        dy_TD, (x_TD, _, weights, records) = case(layout, 70, chosen=1)
        given = x_TD, ids.astype(np.int32), weights, records
        found = experts_vjp(layout)(dy_TD, *given)
        for got, want in zip(found, exact(layout, dy_TD, *given), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_training_takes_them_where_they_suit_and_only_there():
    def traced(expert_dim, wanted=True):
        moe = dataclasses.replace(GQA.moe, expert_dim=expert_dim)
        config = dataclasses.replace(GQA, d_model=32, moe=moe)
        layout, run = RecordLayout.of(config), expert_fn(config)

        def loss(x, weights, records, dense):
            ids = jnp.zeros((4, 2), jnp.int32)
            return run(linear(x, dense), ids, weights, records).sum()

        D, E = config.d_model, config.moe.num_experts
        shapes = (4, D), (4, 2), (E, layout.size), (D, D)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        function = jax.grad(loss, argnums=(0, 1, 2, 3))
        if wanted:
            function = gradients.within(function)
        return str(jax.make_jaxpr(function)(*args))

    assert "moe_edge_train_back" in traced(16)
    assert "moe_edge_product_back" in traced(16)
    assert "moe_edge" not in traced(16, wanted=False)
    assert "moe_edge_train" not in traced(20)  # no whole vectors
    assert "moe_edge_product_back" in traced(20)


def test_bad_shapes_are_refused_by_name():
    x = jnp.zeros((4, 20), jnp.float32)
    run = vjp_of(gradients.product)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no whole vectors of 16"):
        jax.block_until_ready(run(jnp.zeros((4, 3)), x, jnp.zeros((3, 20))))
    layout = RecordLayout(16, 20)
    dy_TD, given = case(layout, 5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="train.*whole"):
        jax.block_until_ready(experts_vjp(layout)(dy_TD, *given))


def attend(window, scale, q_RSP, k_CSP, v_CSP):
    return gradients.attend(q_RSP, k_CSP, v_CSP, window, scale)


def attention_case(heads, cached, length, width):
    """Gradient of the output, queries, keys, values; some weights are nearly 1."""
    rng = np.random.default_rng(length)
    dy, q, k, v = (
        rng.normal(size=(n, length, width)).astype(np.float32)
        for n in (heads, heads, cached, cached)
    )
    return dy, q, 3 * k, v


def exact_attention(q_RSP, k_CSP, v_CSP, window, scale, dy_RSP):
    """Value and gradients in float64, head by head."""
    given = (q_RSP, k_CSP, v_CSP, dy_RSP)
    q_RSP, k_CSP, v_CSP, dy_RSP = (a.astype(np.float64) for a in given)
    y, dq, dk, dv = (np.zeros_like(a) for a in (q_RSP, q_RSP, k_CSP, k_CSP))
    (R, S, _), shared = q_RSP.shape, q_RSP.shape[0] // k_CSP.shape[0]
    past_SS = np.arange(S)[:, None] - np.arange(S)
    for r in range(R):
        q, k, v, dy = q_RSP[r], k_CSP[r // shared], v_CSP[r // shared], dy_RSP[r]
        scores = np.where((past_SS >= 0) & (past_SS < window), scale * q @ k.T, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        y[r] = weights @ v
        dweights = dy @ v.T
        mean = (dweights * weights).sum(axis=1, keepdims=True)
        dscores = scale * weights * (dweights - mean)
        dq[r] = dscores @ k
        dk[r // shared] += dscores.T @ q
        dv[r // shared] += weights.T @ dy
    return y, dq, dk, dv


@pytest.mark.parametrize(
    "heads, cached, length, width, window",
    [
        (1, 1, 1, 16, 99),
        (2, 1, 49, 16, 99),
        (6, 2, 96, 32, 1 << 30),
        (4, 4, 130, 48, 20),
        (3, 3, 61, 64, 1),
        *slow((12, 4, 257, 32, 1 << 30)),
    ],
)
def test_gradients_of_attention(heads, cached, length, width, window):
    dy, q, k, v = attention_case(heads, cached, length, width)
    scale, window = width**-0.5, np.int32(window)
    run = functools.partial(attend, window, scale)
    y, found = vjp_of(run)(dy, q, k, v)
    want = exact_attention(q, k, v, window, scale, dy)
    for got, exact_values in zip((y, *found), want, strict=True):
        assert_close(got, exact_values)
    for threads in (1, 3):
        native.resize(threads)
        _, again = vjp_of(run)(dy, q, k, v)
        assert all((a == b).all() for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((4, 9), (2, 9, 16), (2, 16, 16), (4, 9, 16)), r"expected q \[R, S, P\]"),
        (((3, 9, 16), (2, 9, 16), (2, 16, 16), (3, 9, 16)), "shapes of q, k, turned"),
        (((4, 9, 16), (2, 8, 16), (2, 16, 16), (4, 9, 16)), "shapes of q, k, turned"),
        (((4, 9, 20), (2, 9, 20), (2, 20, 16), (4, 9, 16)), "no whole vectors of 16"),
        (((4, 9, 16), (2, 9, 16), (2, 16, 32), (4, 9, 32)), "keys not padded to such"),
    ],
)
def test_attention_of_bad_shapes_is_refused_by_name(shapes, message):
    q, k, turned, weights = (jnp.zeros(shape, jnp.float32) for shape in shapes)
    of = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, k, weights)]
    forward = jax.ffi.ffi_call("moe_edge_train_attend", [of[0], of[3]])
    back = jax.ffi.ffi_call("moe_edge_train_attend_back", of)
    scale = np.float32(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"train_attend: .*{message}"):
        jax.block_until_ready(forward(q, k, turned, jnp.int32(9), scale=scale))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"_attend_back: .*{message}"):
        jax.block_until_ready(back(q, k, turned, weights, q, scale=scale))


def test_attention_refuses_results_of_other_shapes():
    q, k, turned = (jnp.zeros(s) for s in ((4, 9, 16), (2, 9, 16), (2, 16, 16)))
    weights, other = jnp.zeros((4, 9, 16)), jax.ShapeDtypeStruct((1,), jnp.float32)
    of = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, k, weights)]
    scale = np.float32(1)
    forward = jax.ffi.ffi_call("moe_edge_train_attend", [other, of[3]])
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes of y or window"):
        jax.block_until_ready(forward(q, k, turned, jnp.int32(9), scale=scale))
    for wrong in range(4):
        results = [other if n == wrong else one for n, one in enumerate(of)]
        if wrong == 3:  # the room for scores
            results[3] = jax.ShapeDtypeStruct((4, 9, 32), jnp.float32)
        back = jax.ffi.ffi_call("moe_edge_train_attend_back", results)
        with pytest.raises(jax.errors.JaxRuntimeError, match="shapes of gradients"):
            jax.block_until_ready(back(q, k, turned, weights, q, scale=scale))


@pytest.mark.parametrize("window", [1 << 30, 7])
def test_attention_of_a_model_has_xlas_values_and_gradients(window):
    """Two rows, six query heads on two of keys: every axis has a length of its own."""
    attention = dataclasses.replace(
        GQA.attention, num_heads=6, num_kv_heads=2, head_dim=16, qkv_bias=True
    )
    attention = dataclasses.replace(attention, rope=RopeConfig(dim=16))
    config = dataclasses.replace(GQA, d_model=48, attention=attention)
    module = Attention(config, 0, nnx.Rngs(0))
    graph, state = nnx.split(module)
    rng = np.random.default_rng(4)
    x_BSD, dy_BSD = rng.normal(size=(2, 2, 53, 48)).astype(np.float32)
    start_B = jnp.zeros(2, jnp.int32)
    tables = rope_tables(attention.rope, jnp.broadcast_to(jnp.arange(53), (2, 53)))

    def back(state, x_BSD):
        def run(state, x_BSD):
            return nnx.merge(graph, state)(x_BSD, tables, start_B, window)[0]

        y_BSD, pull = jax.vjp(run, state, x_BSD)
        return y_BSD, pull(dy_BSD)

    assert "moe_edge_train_attend_back" in str(
        jax.make_jaxpr(gradients.within(back))(state, x_BSD)
    )
    found = jax.jit(gradients.within(back))(state, x_BSD)
    wanted = jax.jit(back)(state, x_BSD)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
