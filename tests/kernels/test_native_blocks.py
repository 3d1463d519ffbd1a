"""The host kernels on quantised records against float64 and the other forms."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.programs import jit_step
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import blocks, native
from moe_edge.kernels.experts_at import ExpertsAt
from moe_edge.model.experts import pair_rows, run_pairs
from moe_edge.model.layers import activate
from moe_edge.model.matvec import linear, linear_each
from moe_edge.model.packed import Blocks
from moe_edge.model.quantised import IN_EIGHTS, KINDS, decode, is_interleaved
from moe_edge.model.quantising import encode
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import numpy_sum
from tests.support.host_kernels import needs_kernels, pair_sums
from tests.support.slow_cases import slow
from tests.support.tiny_models import ALL, random_prompts, random_weights

pytestmark = needs_kernels
E = 7
# One or two of each way to hold rows.
SHOWN = [*slow("q8_0", "q4_0", "mxfp4x8"), "mxfp4", "q8_0x8", "q4_0x8"]
SILU = functools.partial(activate, kind="silu", limit=None)
# Rows of one block, of odd numbers of them, and of many.
SIZES = [(32, 32), (96, 32, True), (64, 160), (224, 96, True), (1024, 64)]


@functools.cache
def compiled(layout, rows=False):
    return jax.jit(lambda *a: native.experts(*a[:4], layout, SILU, a[4], rows=rows))


@functools.cache
def case(layout, tokens, chosen=4, seed=0):
    rng = np.random.default_rng(seed)
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(E + 2)[:chosen] for _ in range(tokens)])
    weights_TK = rng.random((tokens, chosen)).astype(np.float32)
    values = rng.normal(size=(E, layout.unquantised.size)).astype(np.float32) * 0.2
    values[1] *= 1e-6  # scales below the normal numbers of float16
    records_ER = np.stack([layout.encode(one) for one in values])
    return x_TD, ids_TK.astype(np.int32), weights_TK, records_ER


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("size", SIZES)
def test_experts_are_their_sum_whatever_the_company(size, kind):
    layout = RecordLayout(*size[:2], len(size) > 2, kind)
    given = case(layout, 17)
    start_TD = np.random.default_rng(1).normal(size=given[0].shape).astype(np.float32)
    run = compiled(layout)
    alone_TD = np.concatenate(
        [
            run(*(a[t : t + 1] for a in given[:3]), given[3], start_TD[t : t + 1])
            for t in range(17)
        ]
    )
    for count in (*range(2, 17, 3), 17):
        for threads in (1, 2, 5):
            native.resize(threads)
            some = [*(a[:count] for a in given[:3]), given[3], start_TD[:count]]
            np.testing.assert_array_equal(run(*some), alone_TD[:count])
    want_TD = start_TD + numpy_sum(given, layout)
    atol = 2e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(alone_TD, want_TD, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", SHOWN)
def test_company_changes_no_bit_with_any_instructions(kind):
    """A compiler that joins products and sums must do so alike for 1 and 4 vectors."""
    layout = RecordLayout(96, 64, True, kind)
    given = case(layout, 7)
    run, zeros_TD = compiled(layout), np.zeros_like(given[0])
    for name in native.INSTRUCTIONS:
        if native.use(name):
            rows = [slice(t, t + 1) for t in range(7)]
            alone = [
                run(*(a[r] for a in given[:3]), given[3], zeros_TD[r]) for r in rows
            ]
            np.testing.assert_array_equal(run(*given, zeros_TD), np.concatenate(alone))


@pytest.mark.parametrize("kind", SHOWN)
def test_weights_are_decoded_exactly_by_all_instructions(kind):
    """Hidden values of 1 at one neuron read single weights of down: no sum rounds."""
    layout = RecordLayout(32, 64, True, kind)
    plain, F = layout.unquantised, 64
    values = np.zeros(plain.size, np.float32)
    down_DF = np.random.default_rng(3).normal(size=(32, F)).astype(np.float32)
    down_DF[5] *= 1e-6
    plain.part(values, "down")[:] = down_DF
    # A gate of 2 + the clip's limit and an up bias of 0: 1 times a constant.
    plain.part(values, "up_bias")[:] = -1.0  # (up + 1) is 0 but for one neuron
    records = []
    for neuron in range(F):
        one = values.copy()
        plain.part(one, "gate_bias")[neuron] = 1.0
        plain.part(one, "up_bias")[neuron] = 0.0
        records.append(layout.encode(one))
    ids_TK = np.arange(F, dtype=np.int32)[:, None]
    ones_TK, x_TD = np.ones((F, 1), np.float32), np.zeros((F, 32), np.float32)
    want_TD = layout.part(records[0], "down").T
    for name in native.INSTRUCTIONS:
        if native.use(name):
            run_at = ExpertsAt(records, layout, "clamped_swiglu", 7.0)
            y_TD = run_at(x_TD, ids_TK, ones_TK)
            # Each row is a weight times the same activation of 1.
            factor = np.float32(1 / (1 + np.exp(-1.702)))
            np.testing.assert_allclose(y_TD, want_TD * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", SHOWN)
def test_rows_of_pairs_sum_to_the_bits_of_the_whole(kind):
    layout = RecordLayout(64, 32, False, kind)
    x_TD, ids_TK, weights_TK, records_ER = case(layout, 6)
    step = native.within(lambda *a: run_pairs(*a, layout, SILU))
    whole_TD = jax.jit(step)(x_TD, ids_TK, weights_TK, records_ER)
    rows = native.within(lambda *a: pair_rows(*a, layout, SILU))
    rows_PD = jax.jit(rows)(x_TD, ids_TK, records_ER)
    assert not np.asarray(rows_PD)[(ids_TK >= E).ravel()].any()
    kept_TK = np.where(ids_TK < E, weights_TK, 0).astype(np.float32)
    summed_TD = pair_sums(np.asarray(rows_PD), kept_TK)
    np.testing.assert_array_equal(summed_TD, whole_TD)


@pytest.mark.parametrize("kind", SHOWN)
def test_records_anywhere_give_the_bits_of_one_array(kind):
    layout = RecordLayout(96, 64, True, kind)
    x_TD, ids_TK, weights_TK, records_ER = case(layout, 5)
    kept = np.array([4, 1, 6])
    place_E = np.full(E + 2, len(kept), np.int32)
    place_E[kept] = range(len(kept))
    only_TK = np.where(np.isin(ids_TK, kept), ids_TK, E).astype(np.int32)
    zeros_TD = np.zeros_like(x_TD)
    want_TD = compiled(layout)(x_TD, only_TK, weights_TK, records_ER, zeros_TD)
    records = [records_ER[e].copy() for e in kept]
    run_at = ExpertsAt(records, layout, "silu", None)
    got_TD = run_at(x_TD, place_E[ids_TK], weights_TK)
    np.testing.assert_array_equal(got_TD, want_TD)
    assert got_TD.any()


@pytest.mark.parametrize("kind", SHOWN)
def test_dense_products_are_those_of_what_rows_mean(kind):
    """Of few vectors and of many; company and threads change no bit of a row."""
    rng = np.random.default_rng(5)
    few = jax.jit(lambda x, *w: native.linear(x, *w))
    many = jax.jit(blocks.product)
    sizes = ((1003, 96), (17, 32), (64, 224))
    if is_interleaved(kind):
        sizes = ((1000, 96), (24, 32), (64, 224))
    for outputs, width in sizes:
        w_OI = rng.normal(size=(outputs, width)).astype(np.float32)
        rows, floats = encode(kind, w_OI), w_OI[:40]
        x_TI = rng.normal(size=(40, width)).astype(np.float32)
        want_TO = x_TI.astype(np.float64) @ decode(kind, rows).T.astype(np.float64)
        limit = {"rtol": 0, "atol": 2e-6 * np.abs(want_TO).max()}
        for name in native.INSTRUCTIONS:
            if not native.use(name):
                continue
            whole_TO = np.asarray(many(x_TI, rows))
            alone = [np.asarray(few(x_TI[t : t + 1], rows)[0])[0] for t in range(8)]
            np.testing.assert_allclose(whole_TO, want_TO, **limit)
            np.testing.assert_allclose(alone, want_TO[:8], **limit)
            native.resize(3)
            pair, beside = few(x_TI[:8], rows, floats)  # blocks and floats in one call
            np.testing.assert_array_equal(pair, alone)
            np.testing.assert_array_equal(pair[:5], few(x_TI[:5], rows)[0])
            np.testing.assert_array_equal(beside, few(x_TI[:8], floats)[0])
            np.testing.assert_array_equal(many(x_TI[7:12], rows), whole_TO[7:12])


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("kind", SHOWN)
def test_a_program_multiplies_blocks_alike_without_kernels(kind, tokens, monkeypatch):
    rng = np.random.default_rng(6)
    rows = encode(kind, rng.normal(size=(56, 64)).astype(np.float32))
    matrix = Blocks(jax.numpy.array(rows), 64, kind)
    x_TI, found = rng.normal(size=(tokens, 64)).astype(np.float32), {}
    wanted = [0, 2] if is_interleaved(kind) and tokens < 9 else [1, 1]
    for choice in ("native", "xla"):
        monkeypatch.setattr(native, "choice", lambda name=choice: name)
        run = jit_step(lambda x, w: [linear(x, w), *linear_each(x[:1], w, w)])
        text = run.lower(x_TI, matrix).as_text()
        calls = [text.count(f"moe_edge_{name}") for name in ("product", "linear")]
        assert calls == (wanted if choice == "native" else [0, 0])
        found[choice] = run(x_TI, matrix)
        if calls == [0, 2]:  # a row in company has the bits of a row alone
            assert (run(x_TI[:1], matrix)[0] == found[choice][0][:1]).all()
    for got, want in zip(*found.values(), strict=True):
        atol = 2e-6 * np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def rounded(x_TI):
    """Whole numbers of 8 bits of vectors and the scales of their blocks, float64."""
    blocks = x_TI.reshape(len(x_TI), -1, 32)
    most = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.float32(127) / np.where(most > 0, most, np.float32(1))
    codes = np.round(blocks * inverse)
    return codes.astype(np.float64), (most / np.float32(127)).astype(np.float64)


@pytest.mark.parametrize("kind", [IN_EIGHTS[kind] for kind in KINDS])
def test_rounded_vectors_meet_rows_in_whole_numbers(kind):
    rng = np.random.default_rng(8)
    exact = jax.jit(lambda x, *w: native.linear(x, *w))
    run = jax.jit(lambda x, *w: native.linear(x, *w, int8=True))
    for outputs, width in ((1000, 96), (24, 32), (64, 224)):
        w_OI = rng.normal(size=(outputs, width)).astype(np.float32)
        w_OI[3, :32], w_OI[5] = 0, np.abs(w_OI[5])
        rows, floats = encode(kind, w_OI), w_OI[:40]
        if kind == "q8_0x8":  # codes that no encoder makes
            rows.view(np.int8)[0, 16:272:32] = -128
        x_TI = rng.normal(size=(6, width)).astype(np.float32)
        x_TI[1, :32], x_TI[2] = 0, np.round(x_TI[2])
        codes, scales = rounded(x_TI)
        want_TO = (codes * scales).reshape(6, -1) @ decode(kind, rows).T.astype(float)
        for name in native.INSTRUCTIONS:
            if not native.use(name):
                continue
            whole_TO, beside = map(np.asarray, run(x_TI, rows, floats))
            atol = 2e-6 * np.abs(want_TO).max()
            np.testing.assert_allclose(whole_TO, want_TO, rtol=0, atol=atol)
            alone = [np.asarray(run(x_TI[t : t + 1], rows)[0])[0] for t in range(6)]
            np.testing.assert_array_equal(alone, whole_TO)
            np.testing.assert_array_equal(beside, exact(x_TI, floats)[0])
            spoiled = np.where(np.arange(width) == 7, np.nan, x_TI)
            assert np.isnan(run(spoiled.astype(np.float32), rows)[0]).all()


@pytest.mark.parametrize("kind", [IN_EIGHTS[kind] for kind in KINDS])
def test_experts_round_what_they_take_and_what_is_hidden(kind):
    exact, layout = (RecordLayout(96, 64, True, kind, int8=i) for i in (False, True))
    x_TD, ids_TK, weights_TK, records_ER = case(exact, 7)
    zeros_TD = np.zeros_like(x_TD)
    for name in native.INSTRUCTIONS:
        if not native.use(name):
            continue
        given = x_TD, ids_TK, weights_TK, records_ER
        want_TD = np.asarray(compiled(exact)(*given, zeros_TD))
        got_TD = np.asarray(compiled(layout)(*given, zeros_TD))
        difference = np.abs(got_TD - want_TD).max() / want_TD.std()
        assert 1e-4 < difference < 5e-2
        alone = [
            compiled(layout)(
                *(a[t : t + 1] for a in given[:3]), records_ER, zeros_TD[:1]
            )
            for t in range(7)
        ]
        np.testing.assert_array_equal(np.concatenate(alone), got_TD)
        rows = native.within(lambda *a: pair_rows(*a, layout, SILU))
        rows_PD = jax.jit(rows)(x_TD, ids_TK, records_ER)
        kept_TK = np.where(ids_TK < E, weights_TK, 0).astype(np.float32)
        summed_TD = pair_sums(np.asarray(rows_PD), kept_TK)
        atol = 1e-6 * np.abs(got_TD).max()
        np.testing.assert_allclose(summed_TD, got_TD, rtol=0, atol=atol)
        run_at = ExpertsAt(list(records_ER), layout, "silu", None)
        np.testing.assert_array_equal(run_at(x_TD, ids_TK, weights_TK), got_TD)


def test_dense_rows_of_other_widths_are_refused():
    x_TI, rows = np.zeros((1, 64), np.float32), np.zeros((5, 35), np.uint8)
    for run in (native.linear, blocks.product):
        with pytest.raises(jax.errors.JaxRuntimeError, match="35 bytes are no .*64"):
            jax.block_until_ready(jax.jit(run)(x_TI, rows))


def test_records_of_another_kind_are_refused():
    layout = RecordLayout(64, 32, True, "q8_0")
    x_TD, ids_TK, weights_TK, records_ER = case(layout, 2)
    start_TD = np.zeros_like(x_TD)

    def call(records, kind, expert_dim=32, x_TD=x_TD):
        run = jax.ffi.ffi_call(
            "moe_edge_experts", jax.ShapeDtypeStruct(x_TD.shape, np.float32)
        )
        options = {
            "expert_dim": np.int64(expert_dim),
            "has_bias": True,
            "activation": np.int64(0),
            "limit": np.float32(0),
            "rows": False,
            "kind": np.int64(kind),
            "int8": False,
        }
        given = x_TD, ids_TK, weights_TK, records, np.zeros_like(x_TD)
        return jax.block_until_ready(jax.jit(lambda *a: run(*a, **options))(*given))

    np.testing.assert_array_equal(
        call(records_ER, 2),
        compiled(layout)(x_TD, ids_TK, weights_TK, records_ER, start_TD),
    )
    error = jax.errors.JaxRuntimeError
    with pytest.raises(error, match=r"bytes with kind 0, expected 2 \(q8_0\)"):
        call(records_ER, 0)
    least = layout.num_values
    short = np.ascontiguousarray(records_ER[:, : least - 1])
    with pytest.raises(error, match=f"records of {least - 1} bytes, expected {least}"):
        call(short, 2)
    with pytest.raises(error, match="D 64, F 33 are no whole blocks of 32"):
        call(records_ER, 2, 33)
    with pytest.raises(error, match="unknown type of records"):
        call(records_ER.view(np.int8), 2)
    with pytest.raises(ConfigError, match="float32 with a layout of kind q8_0"):
        floats = [np.zeros(layout.size, np.float32)]
        ExpertsAt(floats, layout, "silu", None)
    with pytest.raises(ConfigError, match="uint8 with a layout of kind None"):
        plain = layout.unquantised
        ExpertsAt([np.zeros(plain.size, np.uint8)], plain, "silu", None)


@pytest.mark.parametrize("name", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_engines_give_the_same_logits_with_either(name, monkeypatch):
    weights, found = random_weights(ALL[name]), {}
    prompts = random_prompts(ALL[name], [5, 9])
    for choice in ("native", "xla"):
        monkeypatch.setattr(native, "choice", lambda name=choice: name)
        engine = ResidentEngine(weights)
        session = engine.new_session(2, 64)
        logits = [engine.prefill(session, prompts)]
        for _ in range(3):
            tokens_B = jax.numpy.array([1, 2], np.int32)
            active_B = jax.numpy.array([True, True])
            logits.append(engine.decode(session, tokens_B, active_B))
        found[choice] = np.stack(logits)
    spread = found["xla"].std()
    assert 0 < np.abs(found["native"] - found["xla"]).max() < 1e-4 * spread
