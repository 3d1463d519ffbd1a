"""The kernel of a GPU, interpreted: sums of experts, waves, halves of a row."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import grouped, native
from moe_edge.model import expert_groups
from moe_edge.model.expert_waves import ExpertWaves
from moe_edge.model.experts import run_experts
from moe_edge.model.matvec import linear
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import E, K, expected, make_case, numpy_sum
from tests.support.slow_cases import slow
from tests.support.some_gpu import on_some_gpu

ALL_PARTS = "3"  # of MOE_EDGE_PARTS: rows meet bfloat16 as they are
# The second fills no tile; the third has biases.
LAYOUTS = [RecordLayout(64, 128), RecordLayout(20, 12), RecordLayout(48, 16, True)]
TYPES = [np.float32, ml_dtypes.bfloat16]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(grouped, "suits", lambda weights: native.is_wanted())
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.delenv("MOE_EDGE_PARTS", raising=False)
    monkeypatch.setenv("MOE_EDGE_FEW_ROWS", "0")


@pytest.fixture
def all_parts(monkeypatch):
    monkeypatch.setenv("MOE_EDGE_PARTS", ALL_PARTS)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("layout", [*slow(*LAYOUTS[:2]), LAYOUTS[2]])
@pytest.mark.parametrize("tokens", [*slow(1), 7])
def test_activations_inside_the_product(tokens, layout, activation):
    case = make_case(layout, tokens, np.float32)
    limit = 0.3 if activation == "clamped_swiglu" else None
    run = functools.partial(
        run_experts, layout=layout, activation=activation, swiglu_limit=limit
    )
    want_TD = run(*case, method="dense")
    found_TD = step(functools.partial(run, method="pairs"))(*case)
    atol = 1e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(found_TD, want_TD, rtol=0, atol=atol)


def step(function):
    return jax.jit(native.within(function))


@pytest.mark.parametrize("dtype", [*slow(TYPES[0]), TYPES[1]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "method, tokens",
    [*slow(("pairs", 1)), ("pairs", 7), *slow(("blocks", 40)), ("blocks", 70)],
)
def test_sums_equal_numpy(method, tokens, layout, dtype, all_parts):
    case = make_case(layout, tokens, dtype)
    run = step(functools.partial(run_experts, layout=layout, method=method))
    want = expected(case, layout)
    np.testing.assert_allclose(run(*case), want, atol=1e-6 * np.abs(want).max())


# Of the largest sum: what rounding rows to 8 bits, to 16, or not at all may change,
# and what it changes at least.
ERRORS = {1: (1e-4, 6e-3), 2: (1e-6, 2e-5), 3: (0.0, 1e-6)}


@pytest.mark.parametrize(
    "asked, parts", [(None, 1), *slow(("1", 1), ("2", 2)), ("3", 3)]
)
def test_rows_meet_bfloat16_in_as_many_parts_as_asked(asked, parts, monkeypatch):
    """Up to 16 rows, of a product or on average of an expert, and above."""
    if asked is not None:
        monkeypatch.setenv("MOE_EDGE_PARTS", asked)
    for tokens in (7, 70):
        case = make_case(LAYOUTS[0], tokens, TYPES[1])
        run = functools.partial(run_experts, layout=LAYOUTS[0])
        sums = expected(case, LAYOUTS[0]), step(run)(*case)
        x_TI, weight_OI = case[0], case[3].reshape(-1, case[0].shape[1])[:40]
        dense = x_TI @ weight_OI.astype(np.float32).T, step(linear)(x_TI, weight_OI)
        for want, got in (sums, dense):
            error = np.abs(got - want).max() / np.abs(want).max()
            least, most = ERRORS[parts]
            assert least <= error <= most, (tokens, error)


def test_one_row_of_a_dense_product_is_not_rounded():
    x_1I = make_case(LAYOUTS[0], 1, TYPES[1])[0]
    weight_OI = np.ones((4, x_1I.shape[1]), TYPES[1])
    np.testing.assert_allclose(step(linear)(x_1I, weight_OI)[0], x_1I.sum(), rtol=1e-5)


@pytest.mark.parametrize("asked", ["0", "4", "three", ""])
def test_other_numbers_of_parts_are_refused(asked, monkeypatch):
    monkeypatch.setenv("MOE_EDGE_PARTS", asked)
    with pytest.raises(ConfigError, match=f"MOE_EDGE_PARTS '{asked}'; known: 1, 2, 3"):
        step(linear)(np.ones((2, 8), np.float32), np.ones((4, 8), TYPES[1]))


@pytest.mark.parametrize("method, tokens", [("pairs", 5), ("blocks", 40)])
@pytest.mark.parametrize("asked", [*slow("1"), ALL_PARTS])
def test_waves_have_the_bits_of_one(method, tokens, asked, monkeypatch):
    monkeypatch.setenv("MOE_EDGE_PARTS", asked)
    layout = LAYOUTS[2]
    x_TD, ids_TK, weights_TK, experts_ER = case = make_case(layout, tokens, TYPES[1])
    tokens = [jnp.asarray(each) for each in case[:3]]
    waves = ExpertWaves(layout, E, method)

    @step
    def run(carry, slots_SR, slot_of):
        return waves.run(carry, *tokens, slots_SR, slot_of)

    @step
    def finish(carry):
        return waves.finish(carry, *tokens[1:])

    def in_waves(groups):
        carry = step(lambda: waves.start(*tokens[:2]))()
        for group in groups:
            slots_SR = np.zeros((E, layout.size), experts_ER.dtype)
            slot_E = np.full(E, E, np.int32)  # elsewhere
            for slot, expert in enumerate(group):
                slots_SR[slot], slot_E[expert] = experts_ER[expert], slot
            slot_of = slot_E
            if waves.method == "pairs":
                slot_of = np.append(slot_E, E)[ids_TK].astype(np.int32)
            carry = run(carry, slots_SR, slot_of)
        return np.asarray(finish(carry))

    one = in_waves([range(E)])
    want = expected(case, layout)
    atol = ERRORS[int(asked)][1] * np.abs(want).max()
    np.testing.assert_allclose(one, want, atol=atol)
    if method == "pairs":  # whose waves follow the order of the ranks
        np.testing.assert_array_equal(in_waves([[3, 1, 0, 8, 7, 2, 4, 5, 6]]), one)
        # The first two ranks of each token, then the others.
        ranks_TK = np.broadcast_to(np.arange(K), ids_TK.shape)
        first_TK = np.where(ranks_TK < 2, ids_TK, E).astype(np.int32)
        last_TK = np.where(ranks_TK < 2, E, ids_TK).astype(np.int32)
        carry = step(lambda: waves.start(*tokens[:2]))()
        for slot_TK in (first_TK, last_TK):
            carry = run(carry, experts_ER, slot_TK)
        np.testing.assert_array_equal(np.asarray(finish(carry)), one)
    else:
        np.testing.assert_array_equal(in_waves([[4, 0], [8, 7, 1], [2, 3, 5, 6]]), one)


def test_rows_of_pairs_are_zero_where_the_expert_is_not_here():
    layout = LAYOUTS[0]
    x_TD, ids_TK, _, experts_ER = make_case(layout, 5, TYPES[0])
    waves = ExpertWaves(layout, E, "pairs")
    slot_TK = np.where(ids_TK < 4, ids_TK, 4).astype(np.int32)
    run = step(waves.rows)
    rows_PD = np.asarray(run(x_TD, ids_TK, experts_ER[:4], slot_TK))
    assert not rows_PD[slot_TK.reshape(-1) == 4].any()
    for pair in np.flatnonzero(slot_TK.reshape(-1) < 4):
        one = x_TD[pair // K][None], slot_TK.reshape(-1)[pair].reshape(1, 1)
        want_1D = numpy_sum((*one, np.ones((1, 1), np.float32), experts_ER), layout)
        np.testing.assert_allclose(rows_PD[pair], want_1D[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts, bits", [(1, 8), (2, 16), (3, 23)])
def test_parts_of_a_row_keep_its_bits_inside_a_program(parts, bits):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    found = jax.jit(lambda x: grouped.split(x, jnp.bfloat16, parts))(x)
    total = sum(np.asarray(part, np.float64) for part in found)
    error = np.abs(total - x).max() / np.abs(x).max()
    assert error <= 2.0**-bits and (parts == 3) == (error == 0)


def test_what_is_no_number_stays_none():
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    largest = np.finfo(np.float32).max
    x = np.append(bits.view(np.float32), [largest, -largest]).astype(np.float32)
    found = jax.jit(lambda x: grouped.split(x, jnp.bfloat16, 3))(x)
    total = sum(np.asarray(part, np.float64) for part in found)
    np.testing.assert_array_equal(total, x)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_dense_products_read_bfloat16_weights_as_they_are(rows, all_parts):
    random = np.random.default_rng(0)
    x_TI = random.normal(size=(rows, 40)).astype(np.float32)
    weight_OI = random.normal(size=(24, 40)).astype(ml_dtypes.bfloat16)
    want = x_TI @ weight_OI.astype(np.float32).T
    got = step(linear)(x_TI, weight_OI)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "tiles, dtype, parts",
    [
        (grouped.FEW, jnp.bfloat16, "1"),
        (grouped.FEW, jnp.bfloat16, "3"),
        (grouped.FEW, jnp.float32, "1"),
        (grouped.MANY, jnp.bfloat16, "1"),
        (grouped.MANY_WIDE, jnp.float32, "1"),
    ],
)
@pytest.mark.parametrize("layout", [*slow(*LAYOUTS[:2]), LAYOUTS[2]])
def test_kernel_lowers_to_triton_without_a_gpu(
    tiles, dtype, parts, layout, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("MOE_EDGE_PARTS", parts)
    shape = jax.ShapeDtypeStruct
    blocks = grouped.Blocks(*3 * [shape((4,), jnp.int32)])
    x_TI = shape((5, 2 * layout.d_model), jnp.float32)
    given = x_TI, shape((E, layout.size), dtype)

    @jax.jit
    def run(x_TI, records_SR, blocks, source_P, scale_P):
        where = records_SR, 0, blocks, tiles, (30, 2 * layout.expert_dim)
        bias = layout.offsets.get("gate_bias")
        more = {"source_P": source_P, "bias": bias, "scale_P": scale_P}
        return grouped.product(x_TI, *where, combine=jnp.multiply, **more)

    with on_some_gpu():
        pairs = shape((30,), jnp.int32), shape((30,), jnp.float32)
        traced = run.trace(*given, blocks, *pairs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_edge_grouped" in text or "triton" in text


def test_places_are_those_of_a_stable_sort():
    ids_P = np.random.default_rng(0).integers(0, 5, 37).astype(np.int32)
    place_P = np.asarray(grouped.places(jnp.asarray(ids_P)))
    np.testing.assert_array_equal(np.argsort(place_P), np.argsort(ids_P, kind="stable"))


def test_few_rows_an_expert_take_the_smaller_tiles():
    taken = []

    def product(x_TI, records_SR, first, blocks, tiles, outputs, **_):
        taken.append(tiles)
        return jnp.zeros(outputs) if isinstance(outputs, tuple) else outputs

    layout, act = LAYOUTS[0], functools.partial(lambda gate, up: gate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "product", product)
        for tokens in (40, 400):
            x_TD, ids_TK, _, experts_ER = make_case(layout, tokens, TYPES[1])
            out_PD = jnp.zeros((ids_TK.size, 64))
            where = jnp.asarray(x_TD), jnp.asarray(ids_TK), experts_ER, None, E
            expert_groups.fill(out_PD, *where, layout, act)
    assert taken == 2 * [grouped.FEW] + 2 * [grouped.MANY]
