"""Engines whose experts are the work of a GPU's kernels: bits, rounding, perplexity."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.bench.quickstart.texts import BOOKS
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.kernels import (
    decode_attention,
    few,
    few_cuda,
    grouped,
    native,
    side_calls,
)
from tests.support.gpu_kernels import default_models_perplexity, interpreted_kernels
from tests.support.layered import BLOCKS, THREE, StoreReader, forced_logits
from tests.support.tiny_models import (
    ALL,
    BF16,
    random_prompts,
    random_weights,
    score_all,
)

pytestmark = pytest.mark.slow
compiled_fast = pytest.mark.usefixtures("few_optimisations")
STEPS, LENGTHS, TOKENS = 6, (9,), 1024
_calls: list[int] = []  # of the kernel: where its matrix begins


def parts_of(x_PI, dtype) -> list[np.ndarray]:
    """`grouped.split`, in NumPy."""
    if dtype == np.float32:
        return [x_PI]
    found = []
    for _ in range(grouped.num_parts()):
        found.append(x_PI.astype(ml_dtypes.bfloat16).astype(np.float32))
        x_PI = x_PI - found[-1]
    return found


def product_on_host(
    x_TI,
    records_SR,
    first,
    blocks,
    tiles,
    outputs,
    *,
    kind=None,
    source_P=None,
    combine=None,
    bias=None,
    scale_P=None,
):
    """`grouped.product`, row by row. A callback: XLA can fuse nothing with it."""
    is_given = isinstance(outputs, jax.Array)
    P, O = outputs.shape if is_given else outputs  # noqa: E741
    if combine is not None:
        x_TI = combine(*jnp.split(x_TI, 2, axis=1))
    if source_P is None:
        source_P = jnp.zeros(P, jnp.int32) if len(x_TI) == 1 else jnp.arange(P)

    def compute(x_TI, source_P, records_SR, blocks, scale_P, out_PO):
        _calls.append(first)
        x_PI, records_SR = np.asarray(x_TI)[source_P], np.asarray(records_SR)
        parts, width = parts_of(x_PI, records_SR.dtype), x_PI.shape[1]
        empty_PO = np.full((P, O), np.nan, np.float32)
        out_PO = np.array(out_PO) if is_given else empty_PO
        for record, row, count in zip(*map(np.asarray, blocks), strict=True):
            record_R = records_SR[record].astype(np.float32)
            weight_OI = record_R[first : first + O * width].reshape(O, width)
            for each in range(row, row + count):
                y_O = sum(weight_OI @ part_PI[each] for part_PI in parts)
                if bias is not None:
                    y_O = y_O + record_R[bias : bias + O]
                out_PO[each] = y_O if scale_P is None else y_O * scale_P[each]
        return out_PO

    shape = jax.ShapeDtypeStruct((P, O), jnp.float32)
    given = blocks, scale_P, outputs if is_given else None
    return jax.pure_callback(compute, shape, x_TI, source_P, records_SR, *given)


@compiled_fast
@pytest.mark.parametrize("mode", ["layered", "fused", "direct"])
@pytest.mark.parametrize(
    "name, dtype, parts",
    [
        ("gqa", BF16, None),
        ("gqa", BF16, "3"),
        ("gpt_oss", np.float32, None),
    ],
)
def test_waves_have_the_bits_of_the_resident_engine(name, dtype, parts, mode):
    prompts = random_prompts(ALL[name], LENGTHS)
    # Fewer slots than a prompt's experts: it runs in waves.
    given = {"mode": mode}
    if mode == "direct":
        given = {"mode": "layered", "layer_io": mode, "memory": "pinned"}
    options = OffloadOptions(device_memory=f"{100 * 6 / BLOCKS}%", **given)
    with interpreted_kernels(parts) as patch:
        patch.setattr(grouped, "product", product_on_host)
        patch.setenv("MOE_EDGE_FEW_ROWS", "0")
        resident = ResidentEngine(random_weights(ALL[name], dtype=dtype))
        want = forced_logits(resident, prompts, STEPS)
        _calls.clear()
        with make_offloaded(StoreReader(ALL[name], dtype=dtype), options) as engine:
            np.testing.assert_array_equal(forced_logits(engine, prompts, STEPS), want)
    assert len(set(_calls)) == 2 and len(_calls) > 4 * STEPS


@compiled_fast
@pytest.mark.skipif(native.library() is None, reason="needs the host kernels")
@pytest.mark.parametrize(
    "options, count",
    [({"layer_io": "direct", "memory": "pinned"}, 1), ({}, 2)],
)
def test_our_own_cuda_has_the_bits_of_the_resident_engine(options, count, monkeypatch):
    """Mode layered; `test_fused_zero_copy.py` has mode fused."""
    monkeypatch.setattr(few, "_product", None)  # the Triton form
    prompts, given = random_prompts(ALL["gqa"], LENGTHS), {"mode": "layered"} | options
    given = OffloadOptions(device_memory=f"{100 * 12 / BLOCKS}%", **given)
    with interpreted_kernels(None) as patch:
        patch.setenv(few.VARIABLE, "cuda")
        resident = ResidentEngine(random_weights(ALL["gqa"], dtype=BF16))
        want = forced_logits(resident, prompts, STEPS)
        devices, reader = jax.devices()[:count], StoreReader(ALL["gqa"], dtype=BF16)
        few_cuda.open_calls()
        side_calls.watch(True)
        with make_offloaded(reader, given, devices=devices) as engine:
            np.testing.assert_array_equal(forced_logits(engine, prompts, STEPS), want)
        noted = side_calls.watch(False)
    layers = len(ALL["gqa"].moe_layers)
    assert noted.count("compute launches") >= 2 * count * layers * STEPS


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """Steps of decoding attend by one kernel; rows of each traced call."""
    monkeypatch.setenv(decode_attention.VARIABLE, "1")
    found, attend = [], decode_attention.attend

    def counted(products, *given):
        found.append(products["q"].shape[0])
        return attend(products, *given)

    monkeypatch.setattr(decode_attention, "attend", counted)
    return found


@compiled_fast
@pytest.mark.parametrize("mode", ["layered", "fused"])
@pytest.mark.parametrize("name", ["gqa", "gpt_oss", "parts"])
def test_attention_by_one_kernel_has_the_bits_of_the_resident_engine(
    name, mode, attended
):
    prompts = random_prompts(ALL[name], THREE)
    with interpreted_kernels("3") as patch:
        patch.setattr(grouped, "product", product_on_host)
        resident = ResidentEngine(random_weights(ALL[name]))
        want = forced_logits(resident, prompts, STEPS)
        assert attended == ALL[name].num_layers * [len(prompts)]
        options = OffloadOptions(device_memory=f"{100 * 12 / BLOCKS}%", mode=mode)
        with make_offloaded(StoreReader(ALL[name]), options) as engine:
            np.testing.assert_array_equal(forced_logits(engine, prompts, STEPS), want)
    assert len(attended) > ALL[name].num_layers


@compiled_fast
def test_attention_by_one_kernel_equals_a_prompts(attended):
    prompts, new = random_prompts(ALL["gqa"], (38, 3, 33)), 6
    forced = random_prompts(ALL["gqa"], 3 * [new], seed=1)
    full = [prompt + row for prompt, row in zip(prompts, forced, strict=True)]
    with interpreted_kernels("3"):
        engine = ResidentEngine(random_weights(ALL["gqa"], dtype=BF16))
        decoded = forced_logits(engine, prompts, new)
        scored = score_all(engine, full)
    assert attended
    for row in (0, 2):  # the other one ends half-way
        want_SV = scored[row][len(prompts[row]) - 1 :]
        error = np.abs(decoded[:, row] - want_SV).max() / want_SV.std()
        assert error <= 1e-5


@compiled_fast
@pytest.mark.parametrize("parts", [None, "3"])
def test_decoding_equals_a_prompt_but_for_rounding(parts):
    """By default rows are rounded to bfloat16, in other groups each time."""
    prompts, new = random_prompts(ALL["gqa"], (38, 3, 33)), 6
    forced = random_prompts(ALL["gqa"], 3 * [new], seed=1)
    full = [prompt + row for prompt, row in zip(prompts, forced, strict=True)]
    with interpreted_kernels(parts):
        engine = ResidentEngine(random_weights(ALL["gqa"], dtype=BF16))
        decoded_SV = forced_logits(engine, prompts, new)[:, 0]
        scored_SV = score_all(engine, full)[0][len(prompts[0]) - 1 :]
    error_S = np.abs(decoded_SV - scored_SV).max(axis=1) / scored_SV.std()
    if parts == "3":
        assert error_S.max() <= 1e-5
    else:  # one token's third expert is nearly its fourth, and another one then: .07
        assert 1e-3 <= np.median(error_S) <= 2e-2 and error_S.max() <= 0.1


def test_rounding_does_not_change_the_default_models_perplexity():
    text = BOOKS.read_text(encoding="utf-8")
    found = {
        parts: default_models_perplexity(text, TOKENS, parts) for parts in ("1", "3")
    }
    for parts, one in found.items():
        print(f"{parts} parts: {one.value:.5f}, {one.tokens} tokens")
    exact = found["3"].value
    assert found["1"].value == pytest.approx(exact, rel=2e-3)
    with interpreted_kernels(None):
        assert grouped.num_parts() == 1, "the default"
    changed = np.abs(found["1"].nats[0] - found["3"].nats[0])
    assert changed.max() > 1e-3, "rows were rounded"
