"""The CUDA kernel for few rows, by the host's shim: sums, bits, what is loaded."""

import ctypes.util
import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import check_backend, load_engine
from moe_edge.kernels import few, few_cuda, grouped, native, nvrtc, side_calls
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
from tests.support.side_streams import pinned
from tests.support.tiny_models import ALL, BF16

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="needs the host kernels"
)
# Rows of many loads and of a few; such as fill no load of 16 bytes, and more than one a
# lane; an odd number of outputs, with biases, of loads of 16 bytes; rows longer than
# what a warp has under way.
LAYOUTS = [
    *(RecordLayout(64, 128), RecordLayout(261, 13), RecordLayout(47, 16, True)),
    RecordLayout(2312, 24),
]
TYPES = [np.float32, BF16]
ACT = functools.partial(activate, kind="silu", limit=None)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(grouped, "suits", lambda weights: native.is_wanted())
    monkeypatch.setattr(native, "suits", lambda rows, weights: False)
    monkeypatch.setattr(few, "_product", None)  # the Triton form
    monkeypatch.setenv(few.VARIABLE, "cuda")


def step(function):
    return jax.jit(native.within(function))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16])
def test_sums_equal_numpy_without_rounding_rows(tokens, layout, dtype):
    """Some pairs have no expert, and rows of those are NaN where all are so."""
    x_TD, ids_TK, weights_TK, experts_ER = make_case(layout, tokens, dtype)
    want_TD = expected((x_TD, ids_TK, weights_TK, experts_ER), layout)
    experts_ER[E - 1] = np.nan  # which nobody chose
    run = step(functools.partial(run_experts, layout=layout, method="pairs"))
    got_TD = np.asarray(run(x_TD, ids_TK, weights_TK, experts_ER))
    np.testing.assert_allclose(got_TD, want_TD, atol=1e-6 * np.abs(want_TD).max())
    if tokens > 1:
        x_TD[0], ids_TK[0] = np.nan, E
        again_TD = np.asarray(run(x_TD, ids_TK, weights_TK, experts_ER))
        assert not again_TD[0].any()
        np.testing.assert_array_equal(again_TD[1:], got_TD[1:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_bits_that_it_has_alone(layout, dtype):
    """Experts with one to eight rows: by fours, two and one."""
    x_TD, *_, experts_ER = make_case(layout, 8, dtype)
    run = step(functools.partial(pair_rows, layout=layout, act=ACT))
    rows_TKD = rows_beside_each_alone(run, x_TD, experts_ER)
    assert rows_TKD[:7].any(axis=-1).all()


@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_activations_equal_the_dense_form(activation):
    x_TD, *case = make_case(LAYOUTS[2], 3, np.float32)
    limit = 0.3 if activation == "clamped_swiglu" else None
    options = {"layout": LAYOUTS[2], "activation": activation, "swiglu_limit": limit}
    run = step(functools.partial(run_experts, **options, method="pairs"))
    want_TD = run_experts(x_TD, *case, **options, method="dense")
    atol = 1e-6 * np.abs(want_TD).max()
    np.testing.assert_allclose(run(x_TD, *case), want_TD, rtol=0, atol=atol)
    x_TD[1] = np.nan
    assert np.isnan(run(x_TD, *case)[1]).all()


def absent_case(layout, dtype, tokens):
    """(x_TD, slots_SR, slot_TK, host_TK, host_ER), and a program that takes them."""
    x_TD, ids_TK, _, host_ER = make_case(layout, tokens, dtype)
    slots_SR, *where = half_in_slots(ids_TK, host_ER, np.nan)
    S = len(slots_SR)

    @step
    def run(x_TD, slots_SR, slot_TK, host_TK, host_ER):
        rows = few.plan(slot_TK, S, host_TK)
        return few.ffn(x_TD, slots_SR, rows, K, layout, ACT, host_ER=host_ER)

    return ids_TK, (x_TD, jnp.asarray(slots_SR), *where, host_ER), run


@pytest.mark.parametrize("warps", [3, 64])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 6, 16])
def test_absent_experts_are_loaded_once_and_kept(
    tokens, layout, dtype, warps, monkeypatch
):
    """However many rows they have: misses x weights of a record, and as many bytes."""
    monkeypatch.setattr(few_cuda, "MISS_WARPS", warps)
    ids_TK, (x_TD, slots_SR, slot_TK, host_TK, host_ER), run = absent_case(
        layout, dtype, tokens
    )
    few_cuda.open_calls()
    side_calls.watch(True)
    given = x_TD, slots_SR, slot_TK, host_TK, pinned(host_ER)
    got_PD, after_SR = jax.block_until_ready(run(*given))
    noted = side_calls.watch(False)
    absent = np.unique(host_TK[host_TK >= 0])
    assert [line for line in noted if line == "compute launches"] == noted[::2]
    loaded = [re.findall(r"\d+", line) for line in noted[1::2]]
    from_host, from_slots = np.sum(np.array(loaded, int), axis=0)
    assert len(loaded) == 2, "launches"
    weights = layout.num_values * np.dtype(dtype).itemsize
    assert from_host == len(absent) * weights
    # Up to four rows meet weights that are read once; more, again, from the slot.
    slots, counts = np.unique(slot_TK[slot_TK < len(slots_SR)], return_counts=True)
    fours = -(-counts // 4) - np.isin(slots, absent + 1)
    assert from_slots == fours.sum() * weights

    all_there = np.concatenate([host_ER[:1], host_ER, host_ER[:1]])
    whole = functools.partial(pair_rows, layout=layout, act=ACT)
    want_PD = step(whole)(x_TD, slot_TK, jnp.asarray(all_there))
    is_real = (ids_TK < E).reshape(-1)
    got_PD, want_PD = np.asarray(got_PD)[is_real], np.asarray(want_PD)[is_real]
    np.testing.assert_array_equal(got_PD, want_PD)
    want_SR = np.array(slots_SR)
    values = slice(layout.num_values)
    want_SR[absent + 1, values] = host_ER[absent, values]
    np.testing.assert_array_equal(np.float32(after_SR), np.float32(want_SR))


def test_the_triton_form_gives_the_same_but_for_rounding(monkeypatch):
    ids_TK, given, run = absent_case(LAYOUTS[2], BF16, 5)
    got_PD, after_SR = run(*given)
    monkeypatch.undo()
    monkeypatch.setenv(few.VARIABLE, "1")
    *_, other = absent_case(LAYOUTS[2], BF16, 5)
    want_PD, kept_SR = other(*given)
    is_real = (ids_TK < E).reshape(-1)
    got_PD, want_PD = np.asarray(got_PD)[is_real], np.asarray(want_PD)[is_real]
    np.testing.assert_allclose(got_PD, want_PD, atol=1e-6 * np.abs(want_PD).max())
    np.testing.assert_array_equal(np.float32(after_SR), np.float32(kept_SR))


def test_places_that_do_not_exist_are_left_alone():
    layout = LAYOUTS[0]
    x_TD, *_, host_ER = make_case(layout, 1, np.float32)
    slots_SR = jnp.zeros((2, layout.size))
    rows = few.Rows(
        record_B=jnp.array([0, 9, -1], jnp.int32),
        row_B=jnp.arange(3, dtype=jnp.int32),
        count_B=jnp.ones(3, jnp.int32),
        host_B=jnp.array([E, 0, 0], jnp.int32),
        pair_P=jnp.arange(3, dtype=jnp.int32),
    )

    @step
    def run(x_TD, slots_SR, host_ER):
        return few.ffn(x_TD, slots_SR, rows, K, layout, ACT, host_ER=host_ER)[1]

    assert not run(x_TD, slots_SR, host_ER).any()


def test_what_the_kernel_lacks_is_refused(monkeypatch):
    layout = RecordLayout(64, 32, kind="q8_0x8")
    records_ER = jnp.zeros((E, layout.size), jnp.uint8)
    rows = few.plan(jnp.zeros((1, K), jnp.int32), E)
    with pytest.raises(
        ConfigError, match="cuda and the experts are q8_0x8; its kernel"
    ):
        few.ffn(jnp.zeros((1, 64)), records_ER, rows, K, layout, ACT)
    with pytest.raises(ConfigError, match="cuda and the experts are float16"):
        few.ffn(
            *(jnp.zeros((1, 64)), jnp.zeros((E, LAYOUTS[0].size), jnp.float16)),
            *(rows, K, LAYOUTS[0], ACT),
        )
    with pytest.raises(ConfigError, match="only a GPU has its kernel .here is cpu"):
        few.check(None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    few.check(None)
    monkeypatch.setattr(native, "library", lambda: None)
    few_cuda.open_calls.cache_clear()
    with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels"):
        few.check(None)


def test_a_gpu_without_nvrtc_or_driver_is_refused(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    open_calls = few_cuda.open_calls.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "NAMES", ("libnvrtc_none.so",))
        with pytest.raises(ConfigError, match="no NVRTC .* which compiles kernels"):
            open_calls()
    if ctypes.util.find_library("cuda") is None:
        compiled = nvrtc.Compiled(b"image", "")
        monkeypatch.setattr(nvrtc, "compile_cuda", lambda *_: compiled)
        with pytest.raises(ConfigError, match="few.cu does not load: libcuda"):
            open_calls()


def test_gpus_of_several_kinds_are_refused(monkeypatch):
    gpus = [
        SimpleNamespace(platform="gpu", compute_capability=each)
        for each in ("9.0", "8.9", "9.0")
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    with pytest.raises(ConfigError, match="capabilities 8.9, 9.0; choose"):
        few_cuda.open_calls.__wrapped__()


def test_more_than_a_launch_takes_is_refused():
    def run(x_NI, slots_SR):
        rows, shape = few.plan(jnp.zeros((8, K), jnp.int32), E), (8 * K, 1 << 23)
        return few_cuda.product(x_NI, slots_SR, rows, K, (0,), (None,), shape)

    shapes = [
        jax.ShapeDtypeStruct(each, jnp.float32) for each in ((8, 4), (1, 1 << 25))
    ]
    with pytest.raises(ConfigError, match="201326592 numbers .* takes 134217728"):
        jax.eval_shape(run, *shapes)


@pytest.mark.parametrize("name", ["CUDA", "2"])
def test_what_is_no_form_is_refused_before_weights_are_read(name, monkeypatch):
    monkeypatch.setenv(few.VARIABLE, name)
    with pytest.raises(ConfigError, match=f"MOE_EDGE_FEW_ROWS '{name}'; known: 0, 1"):
        load_engine("default")


def test_a_model_without_experts_asks_for_no_kernel():
    layers = tuple(range(ALL["gqa"].num_layers))
    check_backend(dataclasses.replace(ALL["gqa"], dense_layers=layers))


def test_a_cpu_is_refused_before_weights_are_read():
    with pytest.raises(ConfigError, match="only a GPU has its kernel .here is cpu"):
        load_engine("default")


@pytest.mark.parametrize(
    "change, what",
    [
        ({"firsts": (2**20,)}, "a record is shorter than its parts"),
        ({"shape": (2 * K + 1, 64)}, "expected out and a block for each pair"),
        ({"shape": (4 * K, 64)}, "expected out and a block for each pair"),
        ({"host_ER": (E, 32)}, r"expected host \[E, R\]"),
        ({"scale_P": (1,)}, "one value a block, or a pair"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, what):
    layout = LAYOUTS[0]
    rows = few.plan(jnp.zeros((2, K), jnp.int32), E, jnp.zeros((2, K), jnp.int32))
    given = {"firsts": (0,), "biases": (None,), "shape": (2 * K, 64)}
    for name, shape in change.items():
        given[name] = jnp.zeros(shape) if name in ("host_ER", "scale_P") else shape
    x_TD, slots_SR = jnp.zeros((2, 64)), jnp.zeros((E, layout.size))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"few: .*{what}"):
        few_cuda.product(x_TD, slots_SR, rows, K, **given)
