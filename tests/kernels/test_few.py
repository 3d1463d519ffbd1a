"""The experts' kernel for few rows, interpreted: sums, places, absent experts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import few, few_floats, grouped, native
from moe_edge.model.experts import pair_rows, run_experts
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import (
    E,
    K,
    expected,
    half_in_slots,
    make_case,
    rows_beside_each_alone,
)
from tests.support.slow_cases import slow

# The second fills no tile; the third has biases.
LAYOUTS = [RecordLayout(64, 128), RecordLayout(20, 12), RecordLayout(48, 16, True)]
TYPES = [np.float32, ml_dtypes.bfloat16]
ACT = functools.partial(activate, kind="silu", limit=None)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(grouped, "suits", lambda weights: native.is_wanted())
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "1")


def step(function):
    return jax.jit(native.within(function))


@pytest.mark.parametrize("dtype", [*slow(TYPES[0]), TYPES[1]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, *slow(2), 7, *slow(16)])
def test_sums_equal_numpy_without_rounding_rows(tokens, layout, dtype):
    case = make_case(layout, tokens, dtype)
    run = step(functools.partial(run_experts, layout=layout, method="pairs"))
    want = expected(case, layout)
    np.testing.assert_allclose(run(*case), want, atol=1e-6 * np.abs(want).max())


@pytest.mark.usefixtures("few_optimisations")
@pytest.mark.parametrize("dtype", [*slow(TYPES[0]), TYPES[1]])
@pytest.mark.parametrize("layout", [*slow(*LAYOUTS[:2]), LAYOUTS[2]])
def test_a_row_has_the_bits_that_it_has_alone(layout, dtype):
    """Experts with one to eight rows, in a loop; one row alone has none."""
    x_TD, *_, experts_ER = make_case(layout, 8, dtype)
    run = step(functools.partial(pair_rows, layout=layout, act=ACT))
    rows_TKD = rows_beside_each_alone(run, x_TD, experts_ER)
    assert rows_TKD[:7].any(axis=-1).all() and not rows_TKD[7, 2].any()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("tokens", [*slow(1), 7])
def test_activations_equal_the_dense_form(tokens, activation):
    case = make_case(LAYOUTS[2], tokens, np.float32)
    limit = 0.3 if activation == "clamped_swiglu" else None
    options = {"layout": LAYOUTS[2], "activation": activation, "swiglu_limit": limit}
    want_TD = run_experts(*case, **options, method="dense")
    found_TD = step(functools.partial(run_experts, **options, method="pairs"))(*case)
    atol = 1e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(found_TD, want_TD, rtol=0, atol=atol)


def test_rows_of_one_expert_stand_in_one_block():
    record_TK = jnp.asarray([[5, 2], [9, 2], [5, 1]], jnp.int32)
    host_TK = jnp.asarray([[-1, 7], [-1, 7], [-1, 3]], jnp.int32)
    rows = few.plan(record_TK, 9, host_TK)
    count_B = np.asarray(rows.count_B)
    blocks = {
        int(slot): (sorted(np.asarray(rows.pair_P)[row : row + count].tolist()), host)
        for slot, row, count, host in zip(
            *(np.asarray(each).tolist() for each in rows[:4]), strict=True
        )
        if count
    }
    assert blocks == {2: ([1, 3], 7), 1: ([5], 3), 5: ([0, 4], -1)}
    assert (np.asarray(rows.host_B)[:2] >= 0).all() and (count_B[:3] > 0).all()


@pytest.mark.parametrize("tokens", [*slow(1), 4])
@pytest.mark.parametrize("dtype", [*slow(TYPES[0]), TYPES[1]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_absent_experts_are_computed_from_the_host_and_kept(layout, dtype, tokens):
    x_TD, ids_TK, weights_TK, host_ER = make_case(layout, tokens, dtype)
    slots_SR, slot_TK, host_TK = half_in_slots(ids_TK, host_ER, np.nan)
    S = len(slots_SR)

    @step
    def run(x_TD, slots_SR, slot_TK, host_TK, host_ER):
        rows = few.plan(slot_TK, S, host_TK)
        return few.ffn(x_TD, slots_SR, rows, K, layout, ACT, host_ER=host_ER)

    got_PD, after_SR = run(x_TD, slots_SR, slot_TK, host_TK, host_ER)
    all_there = np.concatenate([host_ER[:1], host_ER, host_ER[:1]])
    whole = functools.partial(pair_rows, layout=layout, act=ACT)
    want_PD = step(whole)(x_TD, slot_TK, jnp.asarray(all_there))
    is_real = (ids_TK < E).reshape(-1)
    got_PD, want_PD = np.asarray(got_PD)[is_real], np.asarray(want_PD)[is_real]
    # XLA:CPU may join roundings of one program and not of the other.
    np.testing.assert_allclose(got_PD, want_PD, atol=1e-6 * np.abs(want_PD).max())
    parts = sum(np.prod(shape) for shape in layout.shapes.values())
    for slot in range(S):
        expert = slot - 1
        arrived = expert in ids_TK[host_TK >= 0]
        want_R = host_ER[expert] if arrived else slots_SR[slot]
        found_R = np.asarray(after_SR[slot])
        same = np.float32(found_R[:parts]), np.float32(want_R[:parts])
        np.testing.assert_array_equal(*same)


def test_one_token_that_names_an_expert_twice():
    layout = LAYOUTS[0]
    x_TD, _, _, experts_ER = make_case(layout, 1, np.float32)
    ids_TK = jnp.array([[4, 7, 4]], jnp.int32)

    @step
    def run(x_TD, slots_SR):
        rows = few.plan(ids_TK, E, jnp.full_like(ids_TK, -1))
        given = x_TD, slots_SR, rows, K, layout, ACT
        return few.ffn(*given, host_ER=experts_ER)[0]

    got_PD = np.asarray(run(x_TD, experts_ER))
    np.testing.assert_array_equal(got_PD[0], got_PD[2])
    whole = functools.partial(pair_rows, layout=layout, act=ACT)
    want_PD = step(whole)(x_TD, ids_TK, jnp.asarray(experts_ER))
    np.testing.assert_allclose(got_PD, want_PD, atol=1e-6 * np.abs(want_PD).max())


def test_other_values_of_the_variable_are_refused(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "yes")
    case = make_case(LAYOUTS[0], 1, np.float32)
    run = functools.partial(run_experts, layout=LAYOUTS[0], method="pairs")
    with pytest.raises(ConfigError, match="MOE_EDGE_FEW_ROWS 'yes'; known: 0, 1, cuda"):
        step(run)(*case)


@pytest.mark.parametrize(
    "width, matrices, itemsize, want",
    [
        (2048, 2, 2, (1, 1)),
        (1024, 1, 2, (4, 1)),
        (1408, 1, 2, (2, 1)),
        (2880, 2, 2, (1, 2)),
        (7168, 2, 2, (1, 4)),
        (2048, 2, 4, (1, 2)),
        (20, 1, 2, (16, 1)),
    ],
)
def test_a_thread_holds_as_many_weights_as_fit(width, matrices, itemsize, want):
    assert few_floats.tile_of(width, matrices, itemsize) == want
