"""The experts' kernel for few rows in blocks of few bits, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import eights, few, few_packed, native, rows
from moe_edge.model import quantised
from moe_edge.model.experts import choose_method, pair_rows, run_experts
from moe_edge.model.layers import activate
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import (
    E,
    K,
    half_in_slots,
    numpy_sum,
    rows_beside_each_alone,
)
from tests.support.packed_records import (
    KINDS,
    case_of,
    check_spoiled,
    codes_of,
    layout_of,
    spoiled_case,
)
from tests.support.slow_cases import slow, slow_but

ACT = functools.partial(activate, kind="silu", limit=None)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(eights, "suits", lambda records, layout: True)
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "1")


def step(function):
    return jax.jit(native.within(function))


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_those_of_records(kind):
    form, size = eights.FORMATS[kind], quantised.BLOCK_BYTES[kind]
    assert form.block == quantised.block_of(kind)
    assert form.scale_bytes == quantised.SCALE_BYTES[kind]
    assert 4 * form.words == quantised.EIGHT * size
    assert form.rows == (2 if kind == "mxfp4x8" else 4), "16 bytes but of mxfp4"


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_an_eight_is_read_once(kind):
    form, width = eights.FORMATS[kind], 3 * 128
    words = eights.eight_words(kind, width)
    codes, scales, columns = np.zeros(words, int), np.zeros(words, int), []
    for scale_L1, code_L1, column_L1, known_L1 in eights.places(kind, width, 32):
        known_L = np.asarray(known_L1)[:, 0]
        code_L = np.asarray(code_L1)[known_L]
        codes[code_L + np.arange(8)] += 1
        # Threads of one block ask for the same bytes at once: one read.
        scale_B = np.unique(np.asarray(scale_L1)[known_L])[:, None]
        scales[scale_B + np.arange(form.scale_words)] += 1
        columns += np.asarray(column_L1)[known_L, 0].tolist()
    np.testing.assert_array_equal(codes + scales, 1)
    met = [c + half * 16 for c in columns for half in range(8 // form.bits)]
    assert sorted(met) == [*range(0, width, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_decoded_exactly(kind):
    form, layout = eights.FORMATS[kind], layout_of(kind)
    record_R = codes_of(layout, 1, seed=1)[0]
    want_FD = layout.part(record_R, "gate")
    assert np.isfinite(want_FD).all() and len(np.unique(want_FD)) > 2**form.bits / 2
    words_R, parts = record_R.view(np.int32), range(8 // form.rows)
    found_ND = np.full((8, layout.d_model), np.nan, np.float32)

    @jax.jit
    def decoded(scales, codes):
        scales = jnp.split(scales, form.scale_words, axis=1)
        values = [eights.decode(kind, words) for words in codes]
        factors = [eights.scales(kind, scales, part) for part in parts]
        return [
            [value * factor for value in each]
            for each, factor in zip(values, factors, strict=True)
        ]

    for places in eights.places(kind, layout.d_model, 32):
        scale_L1, code_L1, column_L1, known_L1 = map(np.asarray, places)
        rows = [part * form.rows + np.arange(form.rows)[None] for part in parts]
        scales = words_R[scale_L1 + np.arange(form.scale_words)[None]]
        by_part = decoded(scales, [words_R[code_L1 + row_1N] for row_1N in rows])
        is_L = known_L1[:, 0]
        for row_1N, values in zip(rows, map(np.asarray, by_part), strict=True):
            for place, value_LN in enumerate(values):
                at_L1 = column_L1 + place % 4 + 16 * (place // 4)
                found_ND[row_1N, at_L1[is_L]] = value_LN[is_L]
    np.testing.assert_array_equal(found_ND, want_FD[:8])


@pytest.mark.parametrize(
    "tokens, kind",
    [
        *((1, kind) for kind in KINDS),
        *((3, "q4_0x8"), *slow((5, "q4_0x8"), (8, "q4_0x8"))),
    ],
)
def test_sums_equal_numpy(tokens, kind):
    layout = layout_of(kind, has_bias=kind == "mxfp4x8")
    case = case_of(layout, tokens)
    run = functools.partial(run_experts, layout=layout, method="pairs")
    want_TD = numpy_sum(case, layout)
    atol = 2e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(step(run)(*case), want_TD, atol=atol)


@pytest.mark.parametrize("kind", ["q4_0x8", *slow("mxfp4x8", "fp8x8")])
def test_a_row_has_the_bits_that_it_has_alone(kind):
    """Experts with one to eight rows: by fours, by two and by one."""
    layout, T = layout_of(kind), 8
    x_TD, _, _, experts_ER = case_of(layout, T)
    run = step(functools.partial(pair_rows, layout=layout, act=ACT))
    rows_TKD = rows_beside_each_alone(run, x_TD, experts_ER)
    # A scale of zero makes one output zero.
    assert rows_TKD[:, 0].any(axis=-1).all() and not rows_TKD[7, 2].any()


@pytest.mark.parametrize("kind", slow_but(("fp8x8",), KINDS))
def test_nan_reaches_its_rows_alone(kind):
    layout, x_TD, slot_TK, experts_ER, is_nan_P = spoiled_case(kind)
    run = step(functools.partial(pair_rows, layout=layout, act=ACT))
    # By themselves: the other test says that others do not matter.
    rows = [run(x_TD[t : t + 1], slot_TK[t : t + 1], experts_ER) for t in (0, 1)]
    check_spoiled(np.concatenate(rows), is_nan_P)


@pytest.mark.parametrize(
    "tokens, kind", [(1, "q4_0x8"), *slow((6, "mxfp4x8"), (6, "fp8x8"))]
)
def test_absent_experts_are_brought_from_the_host(tokens, kind, monkeypatch):
    monkeypatch.setattr(few, "MISS_PROGRAMS", 3)
    layout = layout_of(kind, has_bias=kind == "mxfp4x8")
    x_TD, ids_TK, _, host_ER = case_of(layout, tokens)
    slots_SR, slot_TK, host_TK = half_in_slots(ids_TK, host_ER, 0xA5)
    S = len(slots_SR)

    @step
    def run(x_TD, slots_SR, slot_TK, host_TK, host_ER):
        rows = few.plan(slot_TK, S, host_TK)
        return few.ffn(x_TD, slots_SR, rows, K, layout, ACT, host_ER=host_ER)

    got_PD, after_SR = run(x_TD, slots_SR, slot_TK, host_TK, host_ER)
    whole_SR = np.concatenate([host_ER[:1], host_ER, host_ER[:1]])
    want_PD = step(functools.partial(pair_rows, layout=layout, act=ACT))(
        x_TD, slot_TK, whole_SR
    )
    is_real_P = (ids_TK < E).reshape(-1)
    got_PD, want_PD = np.asarray(got_PD)[is_real_P], np.asarray(want_PD)[is_real_P]
    # XLA:CPU may join roundings of one program and not of the other.
    np.testing.assert_allclose(got_PD, want_PD, atol=1e-6 * np.abs(want_PD).max())
    arrived = np.isin(np.arange(S) - 1, ids_TK[host_TK >= 0])[:, None]
    values = layout.num_values
    want_SR = np.where(arrived, whole_SR, slots_SR)[:, :values]
    np.testing.assert_array_equal(np.asarray(after_SR)[:, :values], want_SR)


@pytest.mark.parametrize(
    "kind, width, matrices, warps",
    [
        ("q4_0x8", 2048, 2, 2),
        ("q4_0x8", 1024, 1, 1),
        ("q8_0x8", 2048, 2, 4),
        ("mxfp4x8", 2880, 2, 4),
        ("fp8x8", 7168, 2, 16),
        ("q4_0x8", 64, 2, 1),
    ],
)
def test_a_thread_holds_as_many_weights_as_fit(kind, width, matrices, warps):
    assert few_packed.tile_of(kind, width, matrices) == (8, warps)


def test_what_kernels_do_not_take(monkeypatch):
    monkeypatch.undo()
    records_ER, layout = jnp.zeros((1, 64), jnp.uint8), layout_of("q4_0x8")
    apart = RecordLayout(96, 160, kind="q4_0")
    for name in ("are_possible", "are_wanted"):
        monkeypatch.setattr(rows, name, lambda: True)
    assert not eights.suits(records_ER, layout), "not asked"
    monkeypatch.setenv("MOE_EDGE_PACKED", "1")
    assert eights.suits(records_ER, layout)
    assert not eights.suits(records_ER, apart), "rows apart"
    assert not eights.suits(records_ER.view(jnp.int8), layout)
    assert choose_method(16, np.uint8, "gpu", layout.kind) == "pairs"
    assert choose_method(2, np.uint8, "gpu", apart.kind) == "blocks"
    monkeypatch.setenv("MOE_EDGE_PACKED", "yes")
    with pytest.raises(ConfigError, match="MOE_EDGE_PACKED 'yes'; known: 0, 1"):
        eights.suits(records_ER, layout)
