"""All forms of the expert sum agree with the dense one and with NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.experts import run_experts
from moe_edge.model.matvec import linear, num_lanes, to_float32
from moe_edge.model.record import RecordLayout

E, K = 6, 3
# Lanes suit the first; the second has widths that no vector fits.
LAYOUTS = [RecordLayout(64, 32), RecordLayout(20, 12), RecordLayout(64, 32, True)]
FORMS = ["pairs", "blocks", "ragged"]


def make_case(layout, tokens, seed=0):
    random = np.random.default_rng(seed)
    x_TD = random.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([random.permutation(E)[:K] for _ in range(tokens)])
    weights_TK = random.random((tokens, K)).astype(np.float32)
    experts_ER = random.normal(size=(E, layout.size)).astype(np.float32) * 0.2
    return tuple(
        map(jnp.array, (x_TD, ids_TK.astype(np.int32), weights_TK, experts_ER))
    )


def assert_close(got, want):
    want = np.asarray(want)
    np.testing.assert_allclose(
        np.asarray(got), want, rtol=1e-5, atol=1e-5 * np.abs(want).max()
    )


def run(case, layout, method, **options):
    function = jax.jit(lambda *a: run_experts(*a, layout, method=method, **options))
    return function(*case)


def numpy_sum(case, layout):
    """The experts' weighted sum with SiLU in float64, pair by pair."""
    x, ids, weights, experts = map(np.asarray, case)
    want = np.zeros(x.shape)
    for t, k in np.ndindex(ids.shape):
        part = {
            name: np.asarray(layout.part(experts[ids[t, k]], name), np.float64)
            for name in layout.shapes
        }
        gate = part["gate"] @ x[t] + part.get("gate_bias", 0)
        up = part["up"] @ x[t] + part.get("up_bias", 0)
        out = part["down"] @ (gate / (1 + np.exp(-gate)) * up)
        want[t] += float(weights[t, k]) * (out + part.get("down_bias", 0))
    return want


@pytest.mark.parametrize(
    "method, tokens, layouts",
    [
        ("dense", 3, (0, 2)),
        ("dense", 70, (1,)),
        ("pairs", 1, (0,)),
        ("pairs", 7, (0, 1, 2)),
        ("pairs", 37, (2,)),
        ("blocks", 1, (1,)),
        ("blocks", 7, (2,)),
        ("blocks", 37, (0, 1, 2)),
        ("blocks", 150, (0, 2)),  # 70 and more: a block of MANY_TOKENS
        ("ragged", 1, (2,)),
        ("ragged", 7, (0,)),
        ("ragged", 37, (1,)),
    ],
)
def test_experts_silu_matches_numpy(method, tokens, layouts):
    for layout in (LAYOUTS[i] for i in layouts):
        case = make_case(layout, tokens)
        assert_close(run(case, layout, method), numpy_sum(case, layout))


@pytest.mark.parametrize(
    "method, storage, layouts",
    [
        ("pairs", "uint16", (0, 1, 2)),
        ("blocks", "uint16", (0, 1, 2)),
        ("pairs", "bfloat16", (0,)),
        ("blocks", "bfloat16", (2,)),
        ("ragged", "bfloat16", (0,)),
        ("ragged", "uint16", (1,)),
    ],
)
def test_experts_bfloat16_storage_equals_float32_of_same_values(
    method, storage, layouts
):
    for layout in (LAYOUTS[i] for i in layouts):
        x, ids, weights, experts = make_case(layout, 7)
        stored = np.asarray(experts).astype(ml_dtypes.bfloat16)
        want = numpy_sum((x, ids, weights, stored.astype(np.float32)), layout)
        stored = jnp.array(stored.view(np.uint16) if storage == "uint16" else stored)
        got = np.asarray(run((x, ids, weights, stored), layout, method))
        if method == "ragged":  # multiplies in bfloat16, as GPUs do
            np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
        else:
            assert_close(got, want)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swiglu"])
def test_experts_activation_equals_dense(activation):
    limit = 1.0 if activation == "clamped_swiglu" else None
    options = {"activation": activation, "swiglu_limit": limit}
    case = make_case(LAYOUTS[2], 9)
    want = run(case, LAYOUTS[2], "dense", **options)
    for method in FORMS:
        assert_close(run(case, LAYOUTS[2], method, **options), want)
    assert np.abs(np.asarray(want) - numpy_sum(case, LAYOUTS[2])).max() > 1e-4


@pytest.mark.parametrize("method", ["dense", *FORMS])
def test_experts_padding_tokens_contribute_nothing(method):
    x, ids, weights, experts = make_case(LAYOUTS[2], 9)
    # A padding token may hold anything, even values that overflow.
    padded_ids, padded_x = ids.at[5:].set(E), x.at[5:].set(1e30)
    got = run((padded_x, padded_ids, weights, experts), LAYOUTS[2], method)
    assert_close(got[:5], numpy_sum((x[:5], ids[:5], weights[:5], experts), LAYOUTS[2]))
    if method != "dense":
        assert not np.asarray(got[5:]).any()


@pytest.mark.parametrize("method", FORMS)
def test_experts_all_tokens_to_one_expert_equals_numpy(method):
    x, ids, weights, experts = make_case(LAYOUTS[0], 70)
    case = (x, jnp.full_like(ids, 4), weights, experts)
    assert_close(run(case, LAYOUTS[0], method), numpy_sum(case, LAYOUTS[0]))


@pytest.mark.parametrize("tokens", [2, 40])
def test_experts_other_routing_does_not_compile_again(tokens):
    function = jax.jit(lambda *a: run_experts(*a, LAYOUTS[0]))
    for seed in range(3):
        function(*make_case(LAYOUTS[0], tokens, seed))
    assert function._cache_size() == 1


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
        *((tokens, 64, "uint16") for tokens in (1, 3, 20)),
        *((tokens, 20, "float32") for tokens in (1, 20)),
        *((tokens, 20, "bfloat16") for tokens in (1, 3)),
        (3, 64, "float32"),
        (1, 20, "uint16"),
    ],
)
def test_linear_matches_numpy(tokens, width, storage):
    random = np.random.default_rng(1)
    weight = random.normal(size=(24, width)).astype(ml_dtypes.bfloat16)
    x = random.normal(size=(2, tokens, width)).astype(np.float32)
    stored = weight.view(np.uint16) if storage == "uint16" else weight.astype(storage)
    got = jax.jit(linear)(jnp.array(x), jnp.array(stored))
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
