"""The host kernels for many tokens: against float64, and the order of their sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.engine.programs import jit_step
from moe_edge.kernels import blocks, native
from moe_edge.model.expert_blocks import fill_pairs, run_blocks, sum_pairs
from moe_edge.model.experts import run_experts
from moe_edge.model.layers import activate
from moe_edge.model.matvec import linear
from moe_edge.model.quantised import KINDS
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import numpy_sum
from tests.support.host_kernels import needs_kernels, stored
from tests.support.slow_cases import slow

pytestmark = needs_kernels
E = 7
MANY = 40  # of which threads take whole ones, if they are small
SILU = functools.partial(activate, kind="silu", limit=None)


def case(layout, tokens, chosen=4, dtype=np.float32, seed=0, experts=E):
    """Arguments of `run_experts`, some ids above E among them; float64 records."""
    rng = np.random.default_rng(seed)
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(experts + 2)[:chosen] for _ in range(tokens)])
    weights_TK = rng.random((tokens, chosen)).astype(np.float32)
    values = rng.normal(size=(experts, layout.size)).astype(np.float32) * 0.2
    records_ER, exact_ER = stored(values, dtype)
    return (x_TD, ids_TK.astype(np.int32), weights_TK, records_ER), exact_ER


@functools.cache
def program(layout, kind="silu", limit=None):
    act = functools.partial(activate, kind=kind, limit=limit)
    return jit_step(lambda *a: run_blocks(*a, layout, act))


def assert_close(got_TD, want_TD):
    atol = 2e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [*slow(np.float32), np.uint16])
@pytest.mark.parametrize(
    "width, outputs",
    [*slow((1, 1)), (7, 5), *slow((16, 33), (48, 20)), (100, 130), (1100, 64)],
)
def test_product_is_the_product_whatever_the_company(width, outputs, dtype):
    rng = np.random.default_rng(width)
    w, exact_OI = stored(rng.normal(size=(outputs, width)).astype(np.float32), dtype)
    x_TI = rng.normal(size=(410, width)).astype(np.float32)
    run = jax.jit(blocks.product)
    whole = np.asarray(run(x_TI, w))
    want_TO = x_TI.astype(np.float64) @ exact_OI.T
    np.testing.assert_allclose(whole, want_TO, rtol=0, atol=2e-6 * width**0.5 * 10)
    for tokens in (1, 2, 3, 4, 5, 16, 17, 18, 19, 20, 200):
        for threads in (1, 3):
            native.resize(threads)
            assert (np.asarray(run(x_TI[-tokens:], w)) == whole[-tokens:]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize(
    "layout, tokens",
    [
        ((64, 16), 17),
        ((20, 12), 64),
        ((48, 80, True), 600),
        ((33, 9, True), 33),
        ((96, 200), 129),
        ((1040, 20), 40),
    ],
)
def test_experts_are_their_sum_whatever_the_company(layout, tokens, dtype):
    layout = RecordLayout(*layout)
    given, exact_ER = case(layout, tokens, 4, dtype)
    run = program(layout)
    whole_TD = np.asarray(run(*given))
    assert_close(whole_TD, numpy_sum((*given[:3], exact_ER), layout))
    for threads in (1, 2, 3, 4):
        native.resize(threads)
        assert (np.asarray(run(*given)) == whole_TD).all()
    some = np.random.default_rng(1).permutation(tokens)[: tokens // 2]
    few_TD = run(*(a[some] for a in given[:3]), given[3])
    assert (np.asarray(few_TD) == whole_TD[some]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("layout", [(64, 16), (40, 64, True), (33, 20)])
def test_many_small_experts_have_the_bits_of_one_thread(layout, dtype):
    """Threads take whole experts of them, and parts of one where there are few."""
    layout = RecordLayout(*layout)
    given, exact_ER = case(layout, 90, 6, dtype, experts=MANY)
    run, fill = program(layout), jit_step(lambda *a: fill_pairs(*a, MANY, layout, SILU))
    x_TD, ids_TK, _, records_ER = given
    slot_E, out_PD = np.arange(MANY), np.zeros((ids_TK.size, layout.d_model))
    room = out_PD.astype(np.float32), x_TD, ids_TK, records_ER, slot_E.astype(np.int32)
    native.resize(1)
    whole_TD, filled_PD = np.asarray(run(*given)), np.asarray(fill(*room))
    assert_close(whole_TD, numpy_sum((*given[:3], exact_ER), layout))
    for threads in (2, 3, 5, 20):
        native.resize(threads)
        assert (np.asarray(run(*given)) == whole_TD).all()
        assert (np.asarray(fill(*room)) == filled_PD).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_few_bits_give_the_bits_of_what_they_mean(kind, has_bias):
    """Whatever the instructions: a scale times a code is rounded once."""
    layout = RecordLayout(64, 96, has_bias, kind)
    (x_TD, ids_TK, weights_TK, plain_ER), _ = case(layout.unquantised, 40)
    stored_ER = np.stack([layout.encode(row) for row in plain_ER])
    meant_ER = np.zeros_like(plain_ER)
    for name, start in layout.unquantised.offsets.items():
        values = layout.part(stored_ER, name).reshape(E, -1)
        meant_ER[:, start : start + values.shape[1]] = values
    for instructions in native.INSTRUCTIONS:
        if not native.use(instructions):
            continue
        got = program(layout)(x_TD, ids_TK, weights_TK, stored_ER)
        want = program(layout.unquantised)(x_TD, ids_TK, weights_TK, meant_ER)
        assert (np.asarray(got) == np.asarray(want)).all()
        assert np.abs(got).max() > 0.1


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_instructions_differ_in_rounding_only(dtype):
    layout = RecordLayout(100, 40, True)
    given, exact_ER = case(layout, 40, 4, dtype)
    want_TD = numpy_sum((*given[:3], exact_ER), layout)
    w_OI = given[3][:, :200]
    x_TI = np.tile(given[0], 2)
    for name in native.INSTRUCTIONS:
        if native.use(name):
            whole_TD = np.asarray(program(layout)(*given))
            assert_close(whole_TD, want_TD)
            few_TD = program(layout)(*(a[:19] for a in given[:3]), given[3])
            assert (np.asarray(few_TD) == whole_TD[:19]).all()
            want_TO = x_TI @ exact_ER[:, :200].T
            assert_close(np.asarray(jax.jit(blocks.product)(x_TI, w_OI)), want_TO)


@pytest.mark.parametrize(
    "kind, limit",
    [("silu", None), ("gelu", None), ("gelu_tanh", None), ("clamped_swiglu", 0.7)],
)
def test_activations_are_those_of_the_other_forms(kind, limit):
    layout = RecordLayout(40, 24, True)
    given, _ = case(layout, 20, 3)
    options = {"activation": kind, "swiglu_limit": limit}
    want_TD = run_experts(*given, layout, method="dense", **options)
    got_TD = program(layout, kind, limit)(*given)
    np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=1e-5)


def test_padding_may_hold_anything():
    layout = RecordLayout(33, 20)
    given, _ = case(layout, 20)
    x_TD, ids_TK = given[0].copy(), given[1].copy()
    ids_TK[18:] = E
    want_TD = program(layout)(x_TD, ids_TK, *given[2:])
    x_TD[18:] = np.nan
    got_TD = np.asarray(program(layout)(x_TD, ids_TK, *given[2:]))
    assert (got_TD == want_TD).all() and not got_TD[18:].any()


def test_all_tokens_of_one_expert_and_none():
    layout = RecordLayout(48, 20)
    given, exact_ER = case(layout, 500, 1)
    for expert in (0, E - 1, E):
        ids_TK = np.full_like(given[1], expert)
        got_TD = program(layout)(given[0], ids_TK, *given[2:])
        want_TD = numpy_sum((given[0], ids_TK, given[2], exact_ER), layout)
        np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_waves_write_the_rows_of_their_experts_only(dtype):
    layout, tokens, room = RecordLayout(36, 24, True), 50, 3
    given, _ = case(layout, tokens, 4, dtype)
    x_TD, ids_TK, weights_TK, records_ER = given
    fill = jit_step(lambda *a: fill_pairs(*a, E, layout, SILU), donate_argnums=0)
    out_PD = jnp.full((ids_TK.size + 5, layout.d_model), 7.0)
    written = np.zeros(len(out_PD), bool)
    sorted_P = np.sort(ids_TK, axis=None)
    for held in np.array_split(np.random.default_rng(0).permutation(E), 3):
        slot_E = np.full(E, room, np.int32)
        slot_E[held] = np.arange(len(held))
        slots_SR = np.zeros((room, layout.size), dtype)
        slots_SR[: len(held)] = records_ER[held]
        out_PD = fill(out_PD, x_TD, ids_TK, slots_SR, slot_E)
        written[: ids_TK.size] |= np.isin(sorted_P, held)
        assert ((np.asarray(out_PD) == 7.0).all(axis=1) == ~written).all()
    total = jit_step(lambda *a: sum_pairs(*a, E))
    whole_TD = program(layout)(*given)
    assert (np.asarray(total(out_PD, ids_TK, weights_TK)) == whole_TD).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": np.full((20, 2), -1, np.int32)}, "blocks: expert id -1 is below 0"),
        ({"records": np.zeros((E, 99), np.float32)}, "records of 99 values"),
        ({"records": np.zeros((E, 800), np.int8)}, "unknown type of records"),
        ({"weights": np.zeros((20, 1), np.float32)}, "shapes of weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    layout = RecordLayout(16, 16)
    given = {
        "x": np.zeros((20, 16), np.float32),
        "ids": np.zeros((20, 2), np.int32),
        "weights": np.zeros((20, 2), np.float32),
        "records": np.zeros((E, layout.size), np.float32),
    }
    run = jax.jit(lambda *a: blocks.experts(*a, layout, SILU))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(*(given | change).values()))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out": np.zeros((39, 16), np.float32)}, "fill: outputs have fewer rows"),
        ({"slot": np.full(E, -1, np.int32)}, "fill: slot -1 of an expert is below 0"),
        ({"ids": np.full((20, 2), -5, np.int32)}, "fill: expert id -5 is below 0"),
    ],
)
def test_waves_that_do_not_fit_are_refused(change, message):
    layout = RecordLayout(16, 16)
    given = {
        "out": np.zeros((40, 16), np.float32),
        "x": np.zeros((20, 16), np.float32),
        "ids": np.zeros((20, 2), np.int32),
        "records": np.zeros((E, layout.size), np.float32),
        "slot": np.zeros(E, np.int32),
    }
    run = jax.jit(lambda *a: blocks.fill(*a, layout, SILU))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(*(given | change).values()))


def test_sums_and_products_of_other_shapes_are_refused():
    rows_PD, ids_TK = jnp.zeros((39, 16)), jnp.zeros((20, 2), jnp.int32)
    total = jax.jit(lambda *a: blocks.sum_rows(*a, E))
    with pytest.raises(jax.errors.JaxRuntimeError, match="sum: expected outputs"):
        jax.block_until_ready(total(rows_PD, ids_TK, jnp.zeros((20, 2))))
    call = jax.ffi.ffi_call(
        "moe_edge_product", jax.ShapeDtypeStruct((2, 3), jnp.float32)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="product: shapes do not fit"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 4)), jnp.ones((3, 5))))
    with pytest.raises(jax.errors.JaxRuntimeError, match="product: shapes do not fit"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 0)), jnp.ones((3, 0))))


def test_only_programs_of_steps_are_native():
    w_OI = jnp.ones((8, 4), jnp.uint16)
    x_TI = jnp.ones((17, 4))
    step = jit_step(lambda x_TI: linear(x_TI, w_OI))
    assert "moe_edge_product" in step.lower(x_TI).as_text()
    other = jax.jit(lambda x_TI: linear(x_TI, w_OI))
    assert "moe_edge_product" not in other.lower(x_TI).as_text()
