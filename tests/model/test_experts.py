"""All forms of the expert sum agree with the dense one and with NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.float32 import to_float32
from moe_edge.model.experts import choose_method, run_experts
from moe_edge.model.matvec import linear, num_lanes
from moe_edge.model.quantised import KINDS
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import numpy_sum

E, K = 6, 3
# Lanes suit the first; the second has widths that no vector fits.
LAYOUTS = [RecordLayout(64, 32), RecordLayout(20, 12), RecordLayout(64, 32, True)]
FORMS = ["pairs", "blocks"]


def make_case(layout, tokens, seed=0):
    random = np.random.default_rng(seed)
    x_TD = random.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([random.permutation(E)[:K] for _ in range(tokens)])
    weights_TK = random.random((tokens, K)).astype(np.float32)
    experts_ER = random.normal(size=(E, layout.size)).astype(np.float32) * 0.2
    return x_TD, ids_TK.astype(np.int32), weights_TK, experts_ER


def assert_close(got, want):
    want = np.asarray(want)
    np.testing.assert_allclose(
        np.asarray(got), want, rtol=1e-5, atol=1e-5 * np.abs(want).max()
    )


@functools.cache
def program(layout, method, **options):
    """One for all tests of a form: cases of equal shape do not compile again."""
    return jax.jit(lambda *a: run_experts(*a, layout, method=method, **options))


def run(case, layout, method, **options):
    return program(layout, method, **options)(*case)


@pytest.mark.parametrize(
    "method, tokens, layout",
    [
        ("dense", 7, 1),
        ("dense", 7, 2),
        ("pairs", 1, 1),
        ("pairs", 7, 2),
        ("pairs", 37, 0),
        ("blocks", 1, 1),
        ("blocks", 7, 2),
        ("blocks", 37, 1),
        ("blocks", 150, 0),  # 70 and more: a block of MANY_TOKENS
    ],
)
def test_experts_silu_matches_numpy(method, tokens, layout):
    case, layout = make_case(LAYOUTS[layout], tokens), LAYOUTS[layout]
    assert_close(run(case, layout, method), numpy_sum(case, layout))


@pytest.mark.parametrize(
    "method, storage, layout",
    [
        ("pairs", "uint16", 1),
        ("pairs", "uint16", 2),
        ("pairs", "bfloat16", 0),
        ("blocks", "uint16", 2),
        ("blocks", "bfloat16", 1),
    ],
)
def test_experts_bfloat16_storage_equals_float32_of_same_values(
    method, storage, layout
):
    layout = LAYOUTS[layout]
    x, ids, weights, experts = make_case(layout, 7)
    stored = experts.astype(ml_dtypes.bfloat16)
    want = numpy_sum((x, ids, weights, stored.astype(np.float32)), layout)
    stored = stored.view(np.uint16) if storage == "uint16" else stored
    assert_close(run((x, ids, weights, stored), layout, method), want)


@pytest.mark.parametrize("method", ["dense", *FORMS])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_blocks_match_numpy_of_what_they_mean(method, kind):
    layout = RecordLayout(64, 32, True, kind)
    x, ids, weights, experts = make_case(layout.unquantised, 7)
    case = x, ids, weights, np.stack([layout.encode(one) for one in experts])
    assert_close(run(case, layout, method), numpy_sum(case, layout))


def test_records_that_are_not_of_the_layout_are_refused():
    layout = RecordLayout(64, 32, False, "q8_0")
    x, ids, weights, _ = make_case(layout.unquantised, 2)
    floats = np.zeros((E, layout.size), np.float32)
    with pytest.raises(ConfigError, match="float32 with a layout of kind q8_0"):
        run_experts(x, ids, weights, floats, layout)
    plain = layout.unquantised
    with pytest.raises(ConfigError, match="uint8 with a layout of kind None"):
        run_experts(x, ids, weights, np.zeros((E, plain.size), np.uint8), plain)


def test_blocks_never_decode_all_records_at_once():
    forms = [choose_method(n, np.dtype(np.uint8), "gpu") for n in (1, 2, 99)]
    assert forms == ["pairs", "blocks", "blocks"]
    assert [choose_method(n, np.uint8, "cpu") for n in (16, 17)] == ["pairs", "blocks"]


@pytest.mark.parametrize(
    "activation, methods",
    [("gelu", ["pairs"]), ("gelu_tanh", ["blocks"]), ("clamped_swiglu", FORMS)],
)
def test_experts_activation_equals_dense(activation, methods):
    limit = 1.0 if activation == "clamped_swiglu" else None
    options = {"activation": activation, "swiglu_limit": limit}
    case = make_case(LAYOUTS[2], 7)
    want = run(case, LAYOUTS[2], "dense", **options)
    for method in methods:
        assert_close(run(case, LAYOUTS[2], method, **options), want)
    assert np.abs(np.asarray(want) - numpy_sum(case, LAYOUTS[2])).max() > 1e-4


@pytest.mark.parametrize("method", ["dense", *FORMS])
def test_experts_padding_tokens_contribute_nothing(method):
    x, ids, weights, experts = make_case(LAYOUTS[2], 7)
    # A padding token may hold anything, even values that overflow.
    padded_ids, padded_x = ids.copy(), x.copy()
    padded_ids[5:], padded_x[5:] = E, 1e30
    got = run((padded_x, padded_ids, weights, experts), LAYOUTS[2], method)
    assert_close(got[:5], numpy_sum((x[:5], ids[:5], weights[:5], experts), LAYOUTS[2]))
    if method != "dense":
        assert not np.asarray(got[5:]).any()


@pytest.mark.parametrize("method, tokens", [("pairs", 37), ("blocks", 150)])
def test_experts_all_tokens_to_one_expert_equals_numpy(method, tokens):
    x, ids, weights, experts = make_case(LAYOUTS[0], tokens)
    case = (x, np.full_like(ids, 4), weights, experts)
    assert_close(run(case, LAYOUTS[0], method), numpy_sum(case, LAYOUTS[0]))


@pytest.mark.parametrize("tokens, method", [(7, "pairs"), (37, "blocks")])
def test_experts_other_routing_does_not_compile_again(tokens, method):
    function = jax.jit(lambda *a: run_experts(*a, LAYOUTS[1]))  # chosen by tokens
    for seed in range(3):
        case = make_case(LAYOUTS[1], tokens, seed)
        assert_close(function(*case), numpy_sum(case, LAYOUTS[1]))
    assert function._cache_size() == 1
    assert choose_method(tokens, np.float32, "cpu") == method


def test_experts_rejects_unknown_method_and_limit_without_clamp():
    case = make_case(LAYOUTS[0], 2)
    with pytest.raises(ConfigError, match="unknown expert method 'magic'; known: bl"):
        run_experts(*case, LAYOUTS[0], method="magic")
    with pytest.raises(ConfigError, match="'silu' got swiglu_limit=7.0"):
        run_experts(*case, LAYOUTS[0], swiglu_limit=7.0)
    with pytest.raises(ConfigError, match=r"x_TD has shape \(2, 64\), expected"):
        run_experts(*case, LAYOUTS[1])


@pytest.mark.parametrize(
    ("tokens", "width", "storage"),
    [
        *((tokens, 64, "uint16") for tokens in (1, 20)),
        (3, 20, "uint16"),
        (3, 20, "float32"),
        (3, 20, "bfloat16"),
    ],
)
def test_linear_matches_numpy(tokens, width, storage):
    random = np.random.default_rng(1)
    weight = random.normal(size=(24, width)).astype(ml_dtypes.bfloat16)
    x = random.normal(size=(2, tokens, width)).astype(np.float32)
    stored = weight.view(np.uint16) if storage == "uint16" else weight.astype(storage)
    got = jax.jit(linear)(x, stored)
    assert_close(got, x.astype(np.float64) @ weight.astype(np.float64).T)


def test_to_float32_keeps_bits_of_special_values():
    values = np.array([0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan], ml_dtypes.bfloat16)
    got = to_float32(jnp.array(values.view(np.uint16)))
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint32), values.view(np.uint16).astype(np.uint32) << 16
    )


@pytest.mark.parametrize(
    ("width", "lanes"), [(768, 32), (384, 16), (2048, 128), (2880, 64), (20, None)]
)
def test_num_lanes_divides_width(width, lanes):
    assert num_lanes(width) == lanes
