"""The host kernels on FP8 and INT4 as stored: exact weights, sums within rounding."""

import functools

import jax
import numpy as np
import pytest

from moe_edge.kernels import blocks, native
from moe_edge.kernels.experts_at import ExpertsAt
from moe_edge.model.experts import run_experts
from moe_edge.model.layers import activate
from moe_edge.model.quantised import IN_EIGHTS, KEPT_KINDS, interleave
from moe_edge.model.record import RecordLayout
from tests.support.expert_sums import numpy_sum
from tests.support.host_kernels import needs_kernels

pytestmark = needs_kernels
E, SIZES = 7, [(128, 128), (256, 384, True), (1024, 128)]
SILU = functools.partial(activate, kind="silu", limit=None)


def random_records(layout: RecordLayout, rng) -> np.ndarray:
    """Every code of the kind, scales over many powers of two, some of them negative."""
    kind, records = layout.kind.removesuffix("x8"), []
    for _ in range(E):
        parts = []
        for shape in layout.shapes.values():
            if len(shape) == 1:
                parts.append(rng.normal(size=shape).astype(np.float32).view(np.uint8))
                continue
            rows, width = shape
            scales = 0.1 * rng.normal(size=rows * width // 32)
            scales[:9] *= 1e-9
            if kind == "fp8":
                blocks = rng.integers(0, 256, (rows, width // 128, 132), np.uint8)
                codes = blocks[..., 4:]
                codes[(codes & 0x7F) == 0x7F] = 0x01  # NaN is refused by converting
                each = (scales[: blocks[..., 0].size] / 200).astype(np.float32)
                blocks[..., :4] = each.view(np.uint8).reshape(*blocks.shape[:2], 4)
            else:
                blocks = rng.integers(0, 256, (rows, width // 32, 18), np.uint8)
                half = scales.astype(np.float32).view(np.uint32) >> 16
                each = half.astype(np.uint16).view(np.uint8)
                blocks[..., :2] = each.reshape(*blocks.shape[:2], 2)
            stored = blocks.reshape(rows, -1)
            parts.append(interleave(kind, stored).reshape(-1))
        record = np.concatenate(parts)
        records.append(np.pad(record, (0, layout.size - record.size)))
    return np.stack(records)


@functools.cache
def case(layout, tokens):
    rng = np.random.default_rng(2)
    x_TD = rng.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([rng.permutation(E + 1)[:3] for _ in range(tokens)])
    weights_TK = rng.random((tokens, 3)).astype(np.float32)
    return x_TD, ids_TK.astype(np.int32), weights_TK, random_records(layout, rng)


@functools.cache
def compiled(layout):
    return jax.jit(lambda *a: native.experts(*a[:4], layout, SILU, a[4]))


@pytest.mark.parametrize("kind", KEPT_KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_few_vectors_meet_the_values_whatever_the_company(kind, size):
    layout = RecordLayout(*size[:2], len(size) > 2, IN_EIGHTS[kind])
    given = case(layout, 6)
    zeros_TD = np.zeros_like(given[0])
    want_TD = numpy_sum(given, layout)
    limit = {"rtol": 0, "atol": 3e-6 * np.abs(want_TD).max()}
    for name in native.INSTRUCTIONS:
        if not native.use(name):
            continue
        got_TD = np.asarray(compiled(layout)(*given, zeros_TD))
        np.testing.assert_allclose(got_TD, want_TD, **limit)
        alone = [
            compiled(layout)(*(a[t : t + 1] for a in given[:3]), given[3], zeros_TD[:1])
            for t in range(6)
        ]
        np.testing.assert_array_equal(np.concatenate(alone), got_TD)
        run_at = ExpertsAt(list(given[3]), layout, "silu", None)
        np.testing.assert_array_equal(run_at(*given[:3]), got_TD)


@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_rounded_activations_leave_them_exact(kind):
    exact, rounded = (
        RecordLayout(128, 128, False, IN_EIGHTS[kind], int8=i) for i in (False, True)
    )
    given = case(exact, 6)
    zeros_TD = np.zeros_like(given[0])
    got = [compiled(layout)(*given, zeros_TD) for layout in (exact, rounded)]
    np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("kind", KEPT_KINDS)
@pytest.mark.parametrize("size", SIZES[1:])
def test_many_vectors_give_the_bits_of_the_values(kind, size):
    """A code times its scale is rounded once, as in the dequantised record."""
    layout = RecordLayout(*size[:2], len(size) > 2, IN_EIGHTS[kind])
    given = case(layout, 40)
    meant_ER = np.stack([layout.decoded(record) for record in given[3]])
    for name in native.INSTRUCTIONS:
        if not native.use(name):
            continue
        got, want = (
            jax.jit(lambda *a, of=of: blocks.experts(*a, of, SILU))(*given[:3], records)
            for of, records in ((layout, given[3]), (layout.unquantised, meant_ER))
        )
        np.testing.assert_array_equal(got, want)
        assert np.abs(got).max() > 0.1


@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_xla_multiplies_the_same_values(kind, monkeypatch):
    layout = RecordLayout(256, 128, True, IN_EIGHTS[kind])
    given, found = case(layout, 3), {}
    for choice in ("native", "xla"):
        monkeypatch.setattr(native, "choice", lambda name=choice: name)
        step = native.within(
            lambda *a: run_experts(*a, layout, activation="silu", swiglu_limit=None)
        )
        found[choice] = np.asarray(jax.jit(step)(*given))
    limit = 3e-6 * np.abs(found["xla"]).max()
    np.testing.assert_allclose(*found.values(), rtol=0, atol=limit)
