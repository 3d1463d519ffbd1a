"""The host kernels against float64, and the order of their sums."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.programs import jit_step
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import native
from moe_edge.kernels.experts_at import ExpertsAt
from moe_edge.model.experts import pair_rows, run_experts, run_pairs
from moe_edge.model.layers import activate
from moe_edge.model.matvec import linear, linear_each
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import numpy_sum
from tests.support.host_kernels import needs_kernels, pair_sums, stored
from tests.support.slow_cases import slow
from tests.support.tiny_models import GPT_OSS, GQA, MLA, random_prompts, random_weights

E = 7
WIDTHS = [(1, 1), (7, 5), (16, 33), (32, 16), (48, 20), (64, 100), (100, 17), (200, 40)]
WIDTHS += [(200, 1003)]  # several chunks


@functools.cache
def compiled(name: str, *options):
    if name == "linear":
        return jax.jit(lambda *given: native.linear(*given)[0])
    layout, kind, limit, rows = options
    act = functools.partial(activate, kind=kind, limit=limit)
    return jax.jit(lambda *a: native.experts(*a[:4], layout, act, a[4], rows=rows))


@needs_kernels
@pytest.mark.parametrize("dtype", [*slow(np.float32), np.uint16])
@pytest.mark.parametrize("width, outputs", WIDTHS)
def test_linear_is_the_product_whatever_the_company(width, outputs, dtype):
    rng = np.random.default_rng(width)
    w, exact_OI = stored(rng.normal(size=(outputs, width)).astype(np.float32), dtype)
    x_TI = rng.normal(size=(17, width)).astype(np.float32)
    alone = [np.asarray(compiled("linear")(x_TI[t : t + 1], w))[0] for t in range(17)]
    for tokens in (2, 3, 4, 5, 8, 17):
        for threads in (1, 3):
            native.resize(threads)
            y_TO = np.asarray(compiled("linear")(x_TI[:tokens], w))
            assert (y_TO == alone[:tokens]).all()
    want_TO = x_TI.astype(np.float64) @ exact_OI.T
    np.testing.assert_allclose(alone, want_TO, rtol=0, atol=2e-6 * width**0.5 * 10)


@needs_kernels
def test_several_matrices_in_one_call_have_the_bits_of_each_alone():
    rng, x_TI = np.random.default_rng(0), np.ones((2, 200), np.float32)
    x_TI[:] = rng.normal(size=x_TI.shape)
    shapes = [(1, np.float32), (17, np.uint16), (1003, np.float32), (60, np.uint16)]
    weights = [
        stored(rng.normal(size=(outputs, 200)).astype(np.float32), dtype)[0]
        for outputs, dtype in shapes
    ]
    want = [np.asarray(compiled("linear")(x_TI, each)) for each in weights]
    for threads in (1, 3):
        native.resize(threads)
        products = jax.jit(native.linear)(x_TI, *weights)
        for got, alone in zip(products, want, strict=True):
            np.testing.assert_array_equal(got, alone)


@needs_kernels
@pytest.mark.parametrize("width", [1, 7, 16, 48, 64, 65, 200, 768])
def test_a_norm_is_that_of_float64_whatever_the_company(width):
    rng = np.random.default_rng(width)
    x_TD = 3 * rng.normal(size=(300, width)).astype(np.float32)
    weight_D = rng.normal(size=width).astype(np.float32)
    norm = jax.jit(functools.partial(native.norm, eps=1e-5))
    got_TD = np.asarray(norm(x_TD, weight_D))
    exact_TD = x_TD.astype(np.float64)
    scale_T1 = 1 / np.sqrt((exact_TD**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got_TD, exact_TD * scale_T1 * weight_D, rtol=1e-6)
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(norm(x_TD[:rows], weight_D), got_TD[:rows])


@needs_kernels
@pytest.mark.parametrize(
    "rows, experts, k",
    [(9, 1, 1), (9, 8, 2), (9, 60, 60), (9, 100, 7), (9, 256, 32), (300, 256, 8)],
)
def test_the_best_are_those_of_xla(rows, experts, k):
    rng = np.random.default_rng(experts)
    x_TE = rng.normal(size=(rows, experts)).astype(np.float32)
    x_TE[3:] = np.round(x_TE[3:] * 4) / 4  # many are equal, some 0 and some -0
    x_TE[5], x_TE[6, ::2], x_TE[7, ::2] = -0.0, -np.inf, np.inf
    run = jax.jit(functools.partial(native.top_k, k=k))
    want_TK = np.asarray(jax.lax.top_k(x_TE + 0.0, k)[1])
    for threads in (1, 3):
        native.resize(threads)
        assert (np.asarray(run(x_TE)) == want_TK).all()
    for bits in (0x7FC00000, 0xFFFFFFFF):  # NaN: of no use, but K experts
        x_TE = np.full((2, experts), bits, np.uint32).view(np.float32)
        for ids_K in np.asarray(run(x_TE)):
            assert ((0 <= ids_K) & (ids_K < experts)).all() and len(set(ids_K)) == k


def case(layout, tokens, chosen, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(E + 2)[:chosen] for _ in range(tokens)])
    weights_TK = rng.random((tokens, chosen)).astype(np.float32)
    values = rng.normal(size=(E, layout.size)).astype(np.float32) * 0.2
    records_ER, exact_ER = stored(values, dtype)
    return (x_TD, ids_TK.astype(np.int32), weights_TK, records_ER), exact_ER


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize(
    "layout",
    [(64, 16), (20, 16, True), (20, 12), (48, 80, True), (33, 9, True), (96, 200)],
)
def test_experts_are_their_sum_whatever_the_company(layout, dtype):
    layout, tokens = RecordLayout(*layout), 17
    given, exact_ER = case(layout, tokens, 4, dtype)
    start_TD = np.random.default_rng(1).normal(size=given[0].shape).astype(np.float32)
    run = compiled("experts", layout, "silu", None, False)
    alone = [
        np.asarray(
            run(*(a[t : t + 1] for a in given[:3]), given[3], start_TD[t : t + 1])
        )
        for t in range(tokens)
    ]
    for count in (2, 5, 17):
        for threads in (1, 2, 5):
            native.resize(threads)
            some = [*(a[:count] for a in given[:3]), given[3], start_TD[:count]]
            assert (np.asarray(run(*some)) == np.concatenate(alone[:count])).all()
    want_TD = start_TD + numpy_sum((*given[:3], exact_ER), layout)
    np.testing.assert_allclose(
        np.concatenate(alone), want_TD, rtol=0, atol=2e-6 * np.abs(want_TD).max()
    )


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_instructions_differ_in_rounding_only(dtype):
    layout = RecordLayout(100, 40, True)
    given, exact_ER = case(layout, 6, 4, dtype)
    want_TD = numpy_sum((*given[:3], exact_ER), layout)
    run = compiled("experts", layout, "silu", None, False)
    assert native.use("portable") and not native.use("none")
    for name in native.INSTRUCTIONS:
        if native.use(name):
            assert name in native.describe()
            got_TD = run(*given, np.zeros_like(given[0]))
            atol = 2e-6 * np.abs(want_TD).max()
            np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=atol)


@needs_kernels
@pytest.mark.parametrize(
    "kind, limit",
    [("silu", None), ("gelu", None), ("gelu_tanh", None), ("clamped_swiglu", 0.7)],
)
def test_activations_are_those_of_the_other_forms(kind, limit):
    layout = RecordLayout(40, 24, True)
    given, _ = case(layout, 5, 3, np.float32)
    options = {"activation": kind, "swiglu_limit": limit}
    want_TD = run_experts(*given, layout, method="dense", **options)
    run = compiled("experts", layout, kind, limit, False)
    got_TD = run(*given, np.zeros_like(given[0]))
    np.testing.assert_allclose(got_TD, want_TD, rtol=0, atol=1e-5)


@needs_kernels
def test_activation_of_large_numbers_is_finite():
    layout = RecordLayout(16, 16)
    given, exact_ER = case(layout, 3, 2, np.float32)
    given = (1e3 * given[0], *given[1:])
    run = compiled("experts", layout, "silu", None, False)
    with np.errstate(over="ignore"):
        want_TD = numpy_sum((*given[:3], exact_ER), layout)
    got_TD = run(*given, np.zeros_like(given[0]))
    np.testing.assert_allclose(got_TD, want_TD, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("part", ["gate", "up"])
def test_a_weight_that_is_no_number_shows(part):
    layout = RecordLayout(16, 16, True)
    given, _ = case(layout, 3, 2, np.float32)
    layout.part(given[3], part)[:, 3, 5] = np.nan
    run = compiled("experts", layout, "clamped_swiglu", 7.0, False)
    assert np.isnan(run(*given, np.zeros_like(given[0]))).all()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_too_small_to_be_exact_is_0_whoever_computes(threads):
    """As in programs of XLA: their threads are not those of the team."""
    native.resize(threads)
    w_OI = np.full((1000, 200), 1e-39, np.float32)
    assert not np.asarray(compiled("linear")(np.ones((2, 200), np.float32), w_OI)).any()
    layout = RecordLayout(96, 200)
    given, _ = case(layout, 3, 2, np.float32)
    layout.part(given[3], "down")[:] = 1e-39
    x_TD, ids_TK, weights_TK, records_ER = given
    run_at = ExpertsAt(list(records_ER), layout, "silu", None)
    assert not run_at(x_TD, ids_TK, weights_TK).any()


@needs_kernels
@pytest.mark.parametrize("instructions", [None, "portable"])
def test_rows_of_pairs_sum_to_the_bits_of_the_whole(instructions):
    """As where another server computes some of them."""
    assert native.use(instructions)
    layout = RecordLayout(64, 16)
    given, _ = case(layout, 6, 4, np.float32)
    x_TD, ids_TK, weights_TK, records_ER = given
    act = functools.partial(activate, kind="silu", limit=None)
    whole = jit_step(lambda *a: run_pairs(*a, layout, act))(*given)
    rows_PD = jit_step(lambda *a: pair_rows(*a, layout, act))(x_TD, ids_TK, records_ER)
    assert not np.asarray(rows_PD)[(ids_TK >= E).ravel()].any()
    weights_TK = np.where(ids_TK < E, weights_TK, 0).astype(np.float32)
    assert (pair_sums(np.asarray(rows_PD), weights_TK) == whole).all()


def test_experts_of_the_host_say_that_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ConfigError, match="the host kernels were not built; run pip i"):
        ExpertsAt([], RecordLayout(64, 16), "silu", None)


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_records_anywhere_give_the_bits_of_one_array(dtype):
    """As the host computes absent experts, straight from the files."""
    layout = RecordLayout(48, 20, True)
    given, _ = case(layout, 5, 4, dtype)
    x_TD, ids_TK, weights_TK, records_ER = given
    run = compiled("experts", layout, "silu", None, False)
    kept = np.array([4, 1, 6])
    place_E = np.full(E + 2, len(kept), np.int32)
    place_E[kept] = range(len(kept))
    only_TK = np.where(np.isin(ids_TK, kept), ids_TK, E).astype(np.int32)
    want_TD = run(x_TD, only_TK, weights_TK, records_ER, np.zeros_like(x_TD))
    size = records_ER[0].nbytes
    memory = [np.empty(size + 1, np.uint8)[1:] for _ in kept]  # aligned to nothing
    records = [some.view(records_ER.dtype) for some in memory]
    for record_R, e in zip(records, kept, strict=True):
        record_R[:] = records_ER[e]
    host = x_TD, place_E[ids_TK], weights_TK
    got_TD = ExpertsAt(records, layout, "silu", None)(*host)
    assert (got_TD == want_TD).all() and got_TD.any()
    every = ExpertsAt(list(records_ER), layout, "silu", None)
    assert (every(x_TD, ids_TK, weights_TK, [*kept, E, -1]) == want_TD).all()
    assert not every(x_TD, ids_TK, weights_TK, []).any()
    assert not ExpertsAt([], layout, "silu", None)(*host).any()


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_many_large_experts_give_the_bits_of_one_alone(dtype):
    native.resize(2)
    layout, rng, many = RecordLayout(512, 256), np.random.default_rng(0), 24
    values = rng.normal(0, 0.05, (many, layout.size)).astype(np.float32)
    records_ER = values if dtype == np.float32 else (values.view(np.uint32) >> 16)
    run_at = ExpertsAt(list(records_ER.astype(dtype)), layout, "silu", None)
    x_TD = rng.normal(size=(3, 512)).astype(np.float32)
    # All of them: more than twice the chunks of two members.
    ids_TK = rng.permutation(many).reshape(3, 8).astype(np.int32)
    for k in range(8):
        weights_TK = np.zeros((3, 8), np.float32)
        weights_TK[:, k] = 0.7
        alone_TK = np.where(np.arange(8) == k, ids_TK, many).astype(np.int32)
        for t in range(3):
            one = slice(t, t + 1)
            alone_TD = run_at(x_TD[one], alone_TK[one], weights_TK[one])
            together_TD = run_at(x_TD, ids_TK, weights_TK)[one]
            assert (together_TD == alone_TD).all() and alone_TD.any()


@needs_kernels
@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids_TK": np.full((2, 2), -1, np.int32)}, "expert id -1 is below 0"),
        ({"ids_TK": np.full((2, 2), 1 << 32)}, "ids_TK is int64, expected int32"),
        ({"x_TD": np.zeros((2, 15), np.float32)}, "x_TD"),
        ({"records": [np.zeros(768, np.float16)]}, "records are float16"),
        ({"weights_TK": np.zeros((2, 1), np.float32)}, "weights_TK"),
        ({"records": [np.zeros(99, np.float32)]}, "record"),
        ({"records": [np.zeros(1536, np.float32)[::2]]}, "contiguous"),
    ],
)
def test_records_that_do_not_fit_are_refused(change, message):
    layout = RecordLayout(16, 16)
    given = {
        "x_TD": np.zeros((2, 16), np.float32),
        "ids_TK": np.zeros((2, 2), np.int32),
        "weights_TK": np.zeros((2, 2), np.float32),
        "records": [np.zeros(layout.size, np.float32)],
    }
    given |= change
    with pytest.raises(ConfigError, match=message):
        ExpertsAt(given.pop("records"), layout, "silu", 0.0)(**given)


@needs_kernels
@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": np.full((2, 2), -1, np.int32)}, "expert id -1 is below 0"),
        ({"records": np.zeros((E, 99), np.float32)}, "records of 99 values"),
        ({"records": np.zeros((E, 800), np.int8)}, "unknown type of records"),
        ({"ids": np.zeros((3, 2), np.int32)}, r"expected x \[T, D\], ids"),
        ({"weights": np.zeros((2, 1), np.float32)}, "weights, start or y"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    layout = RecordLayout(16, 16)
    given = {
        "x": np.zeros((2, 16), np.float32),
        "ids": np.zeros((2, 2), np.int32),
        "weights": np.zeros((2, 2), np.float32),
        "records": np.zeros((E, layout.size), np.float32),
        "start": np.zeros((2, 16), np.float32),
    }
    run = compiled("experts", layout, "silu", None, False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(*(given | change).values()))


@needs_kernels
def test_linear_of_other_shapes_is_refused():
    call = functools.partial(
        jax.ffi.ffi_call("moe_edge_linear", jax.ShapeDtypeStruct((2, 3), jnp.float32)),
        int8=False,
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not fit"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 4)), jnp.ones((3, 5))))


@needs_kernels
def test_weights_without_a_result_are_refused():
    shapes = [jax.ShapeDtypeStruct((2, 3), jnp.float32)] * 2
    call = functools.partial(jax.ffi.ffi_call("moe_edge_linear", shapes), int8=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="as many results as weights"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 4)), jnp.ones((3, 4))))


@needs_kernels
def test_a_norm_of_another_width_is_refused():
    norm = jax.jit(functools.partial(native.norm, eps=1e-5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="norm: shapes do not fit"):
        jax.block_until_ready(norm(jnp.ones((2, 4)), jnp.ones(5)))


@needs_kernels
def test_more_than_there_are_is_refused():
    call = jax.ffi.ffi_call("moe_edge_top_k", jax.ShapeDtypeStruct((2, 5), jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="K <= E"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 4))))


@pytest.mark.parametrize(
    "name",
    [
        "gqa",
        pytest.param("mla", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)
@needs_kernels
def test_engines_give_the_same_logits_with_either(name, monkeypatch):
    config = {"gqa": GQA, "mla": MLA, "gpt_oss": GPT_OSS}[name]
    weights, found = random_weights(config), {}
    prompts = random_prompts(config, [5, 9])
    for choice in ("native", "xla"):
        monkeypatch.setattr(native, "choice", lambda name=choice: name)
        engine = ResidentEngine(weights)
        session = engine.new_session(2, 64)
        logits = [engine.prefill(session, prompts)]
        for _ in range(4):
            tokens_B = jnp.array([1, 2], jnp.int32)
            logits.append(engine.decode(session, tokens_B, jnp.array([True, True])))
        found[choice] = np.stack(logits)
    spread = found["xla"].std()
    assert 0 < np.abs(found["native"] - found["xla"]).max() < 1e-4 * spread


@needs_kernels
def test_only_programs_of_steps_are_native():
    w_OI = jnp.ones((8, 4))
    step = jit_step(lambda x_TI: linear(x_TI, w_OI))
    assert "moe_edge_linear" in step.lower(jnp.ones((2, 4))).as_text()
    assert "moe_edge_linear" not in step.lower(jnp.ones((17, 4))).as_text()
    other = jax.jit(lambda x_TI: linear(x_TI, w_OI))
    assert "moe_edge_linear" not in other.lower(jnp.ones((2, 4))).as_text()


@needs_kernels
def test_products_of_the_same_vectors_are_one_call():
    rng, width = np.random.default_rng(0), 200
    weights = [
        jnp.asarray(rng.standard_normal((outputs, width), np.float32))
        for outputs in (8, 3)
    ]
    step = jit_step(lambda x_BSI: linear_each(x_BSI, *weights))
    text = step.lower(jnp.ones((1, 2, width))).as_text()
    assert text.count("moe_edge_linear") == 1
    assert "moe_edge_linear" not in step.lower(jnp.ones((1, 3, width))).as_text()
    for rows in (1, 2, 3):
        x_BSI = jnp.asarray(rng.standard_normal((1, rows, width), np.float32))
        alone = [jit_step(linear)(x_BSI, each) for each in weights]
        for got, want in zip(step(x_BSI), alone, strict=True):
            np.testing.assert_array_equal(got, want)


def test_no_constant_of_a_set_hides_one_of_all_sets():
    """Its namespace's own would be used by the files after it, without a word."""
    folder = Path(native.__file__).parent / "native"

    def constants(pattern):
        text = "\n".join(path.read_text() for path in folder.glob(pattern))
        return set(re.findall(r"^(?:inline )?constexpr \w+ (k\w+)", text, re.M))

    assert {"kBlock", "kColumns"} <= constants("*.h") and "kRows" in constants("*.inc")
    assert constants("*.h") & constants("*.inc") == set()
