"""The matrix units' kernel for experts in blocks of few bits, interpreted."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.kernels import eights, grouped, native
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import pair_rows, run_experts
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import E, numpy_sum
from tests.support.packed_records import (
    KINDS,
    case_of,
    check_spoiled,
    layout_of,
    spoiled_case,
)
from tests.support.slow_cases import slow, slow_but

ACT = functools.partial(activate, kind="silu", limit=None)
# Of the largest sum: what rows rounded to bfloat16 may cost, and rows as they are.
ERRORS = {"1": 6e-3, "3": 1e-6}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(eights, "suits", lambda records, layout: native.is_wanted())
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "0")
    monkeypatch.setenv("MOE_EDGE_PARTS", "3")


def step(function):
    return jax.jit(native.within(function))


def run_of(layout: RecordLayout, method: str = "blocks", **options):
    return step(functools.partial(run_experts, layout=layout, method=method, **options))


def shared_case(layout: RecordLayout, tokens: int):
    """All tokens choose expert 0, and no one expert E - 1; some chose fewer than K."""
    x_TD, ids_TK, weights_TK, experts_ER = case_of(layout, tokens)
    ids_TK[ids_TK == 0] = E
    ids_TK[:, 0] = 0
    return x_TD, ids_TK, weights_TK, experts_ER


@pytest.mark.parametrize("parts", ERRORS)
@pytest.mark.parametrize(
    "rows, kind",
    [
        *((17, kind) for kind in KINDS),
        *slow(*((5, kind) for kind in KINDS), *((300, kind) for kind in KINDS)),
        *((8, "q8_0x8"), (64, "q4_0x8"), *slow((512, "q4_0x8"), (512, "fp8x8"))),
    ],
)
def test_sums_equal_numpy(rows, kind, parts, monkeypatch):
    """So many rows of one expert: by tiles of 16 rows, and of 64."""
    monkeypatch.setenv("MOE_EDGE_PARTS", parts)
    layout = layout_of(kind, has_bias=kind == "mxfp4x8")
    case = shared_case(layout, rows)
    want_TD = numpy_sum(case, layout)
    error = np.abs(run_of(layout)(*case) - want_TD).max() / np.abs(want_TD).max()
    assert error < ERRORS[parts]
    if parts == "1" and kind != "mxfp4x8":  # whose biases are most of its sums
        assert error > ERRORS["3"], "rows were rounded"


@pytest.mark.parametrize("tokens", [*slow(1), 6])
def test_few_rows_where_they_are_to_be_many(tokens):
    """MOE_EDGE_FEW_ROWS is 0, or the activation one that Triton lacks."""
    layout = layout_of("q4_0x8")
    case = case_of(layout, tokens)
    want_TD = numpy_sum(case, layout)
    atol = 1e-6 * np.abs(want_TD).max()
    found_TD = run_of(layout, "pairs")(*case)
    np.testing.assert_allclose(found_TD, want_TD, rtol=0, atol=atol)


def test_exact_gelu_is_no_hindrance(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "1")
    layout = layout_of("q4_0x8")
    case = case_of(layout, 3)
    want_TD = run_experts(*case, layout, activation="gelu", method="dense")
    found_TD = run_of(layout, "pairs", activation="gelu")(*case)
    atol = 1e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(found_TD, want_TD, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", slow_but(("q4_0x8", "fp8x8"), KINDS))
def test_waves_have_the_bits_of_all_experts_at_once(kind):
    layout = layout_of(kind, has_bias=kind == "mxfp4x8")
    x_TD, ids_TK, weights_TK, experts_ER = case_of(layout, 70)
    waves = ExpertWaves(layout, E, "blocks", "silu", None)

    @step
    def in_waves(x_TD, ids_TK, weights_TK, slots, slot_E):
        out = waves.start(x_TD, ids_TK)
        for records_SR, where_E in zip(slots, slot_E, strict=True):
            out = waves.run(out, x_TD, ids_TK, weights_TK, records_SR, where_E)
        return waves.finish(out, ids_TK, weights_TK)

    half, S = E // 2, E - E // 2
    first_E = np.where(np.arange(E) < half, np.arange(E), S).astype(np.int32)
    second_E = np.where(np.arange(E) < half, S, np.arange(E) - half).astype(np.int32)
    slots = np.pad(experts_ER[:half], ((0, S - half), (0, 0))), experts_ER[half:]
    found_TD = in_waves(x_TD, ids_TK, weights_TK, slots, (first_E, second_E))
    whole_TD = run_of(layout)(x_TD, ids_TK, weights_TK, experts_ER)
    np.testing.assert_array_equal(found_TD, whole_TD)


@pytest.mark.parametrize("kind", slow_but(("fp8x8",), KINDS))
def test_nan_reaches_its_rows_alone(kind):
    layout, x_TD, slot_TK, experts_ER, is_nan_P = spoiled_case(kind)
    rows_PD = step(functools.partial(pair_rows, layout=layout, act=ACT))(
        x_TD, slot_TK, experts_ER
    )
    check_spoiled(rows_PD, is_nan_P)


def test_matrices_that_fill_no_tile(monkeypatch):
    """Outputs, inputs and rows beyond whole tiles."""
    tiles = grouped.Tiles(16, 64, 256, 4, 3)
    monkeypatch.setattr(grouped, "FEW", tiles)
    for kind in ("q8_0x8", "int4x8"):
        layout = layout_of(kind)
        case = case_of(layout, 7)
        want_TD = numpy_sum(case, layout)
        atol = 1e-6 * np.abs(want_TD).max()
        np.testing.assert_allclose(run_of(layout)(*case), want_TD, rtol=0, atol=atol)
