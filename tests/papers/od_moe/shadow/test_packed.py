"""Weights at lower precision: what they decode to, and their products."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.core.float32 import to_float32
from moe_edge.model.expert_blocks import load_expert
from moe_edge.model.matvec import linear
from moe_edge.model.record import RecordLayout
from moe_edge.papers.od_moe.shadow.formats import BLOCK, FORMATS, NF4, pack
from moe_edge.papers.od_moe.shadow.packed_experts import (
    pack_experts,
    run_packed_experts,
)
from tests.support.expert_sums import numpy_sum
from tests.support.slow_cases import slow

pack = jax.jit(pack, static_argnames="name")
decode = jax.jit(lambda packed: packed.decode())
multiply = jax.jit(linear)
load = jax.jit(lambda experts, expert: experts.load(expert))
HALF = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@functools.cache
def matrix(shape, scale=0.05) -> np.ndarray:
    random = np.random.default_rng(0)
    return (scale * random.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("name", HALF)
def test_half_formats_hold_rounded_weights(name):
    weight = matrix((5, 192)).copy()
    weight[0, :3] = 1e9, -1e9, 0.0  # beyond float16: its largest value
    weight[1, :3] = 3e-6, -6e-8, 5.9e-5  # subnormal in float16
    limit = 65504.0 if name == "fp16" else np.inf
    want = np.clip(weight, -limit, limit).astype(HALF[name]).astype(np.float32)
    np.testing.assert_array_equal(decode(pack(weight, name=name)), want)


def test_int8_is_symmetric_a_row_and_keeps_the_largest_weight():
    weight = matrix((5, 192)).copy()
    weight[3] = 0.0
    packed = pack(weight, name="int8")
    assert packed.codes.dtype == jnp.int8
    assert np.abs(np.asarray(packed.codes, np.int32)).max() == 127
    largest_O1 = np.abs(weight).max(axis=1, keepdims=True)
    decoded = np.asarray(decode(packed))
    error = np.abs(decoded - weight)
    assert (error <= largest_O1 / 254 * (1 + 1e-5)).all()
    assert error[3].max() == 0
    largest = np.abs(decoded).max(axis=1, keepdims=True)
    np.testing.assert_allclose(largest, largest_O1, rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 192), (7, 40)])
def test_nf4_takes_the_nearest_level_of_every_block(shape):
    weight = matrix(shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    rows, width = shape
    want = np.zeros(shape, np.float32)
    for row, first in np.ndindex(rows, -(-width // BLOCK)):
        part = slice(first * BLOCK, (first + 1) * BLOCK)
        block = weight[row, part]
        levels = np.array(NF4, np.float32) * np.abs(block).max()
        nearest = np.abs(block[:, None] - levels[None]).argmin(axis=1)
        want[row, part] = levels[nearest]
    np.testing.assert_allclose(decode(pack(weight, name="nf4")), want, rtol=1e-6)


@pytest.mark.parametrize(
    "name, shape, tokens",
    [
        *((name, shape, 2) for name in FORMATS for shape in ((5, 128), (7, 40))),
        ("bf16", (5, 128), 9),  # many tokens: the matrix is decoded once
        ("int8", (5, 128), 9),
    ],
)
def test_product_is_that_of_the_decoded_matrix(name, shape, tokens):
    packed = pack(matrix(shape), name=name)
    x_TI = matrix((tokens, shape[1]), scale=1.0)
    got = multiply(x_TI, packed)
    rounded = x_TI.astype(HALF.get(name, np.float32))
    want = rounded.astype(np.float64) @ np.asarray(decode(packed), np.float64).T
    digits = {"fp16": 5e-4, "bf16": 4e-3}.get(name, 2e-6)  # of the rounded result
    np.testing.assert_allclose(got, want, rtol=digits, atol=digits * np.abs(want).max())
    if name in HALF:
        np.testing.assert_array_equal(got, np.asarray(got).astype(HALF[name]))


@pytest.mark.parametrize("name, bits", [("fp16", 16), ("int8", 8), ("nf4", 4.25)])
def test_weights_are_held_at_their_size(name, bits):
    packed = pack(matrix((384, 192)), name=name)
    scales = 4 * 384 if name == "int8" else 0
    held_bytes = sum(array.nbytes for array in jax.tree.leaves(packed))
    assert held_bytes == 384 * 192 * bits / 8 + scales
    assert packed.shape == (384, 192)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_decode_to_rows(name):
    table = pack(matrix((6, 40)), name=name)
    rows_BS = np.array([[4, 0], [4, 5]])
    got = jax.jit(lambda table, rows: to_float32(table[rows]))(table, rows_BS)
    np.testing.assert_array_equal(got, np.asarray(decode(table))[rows_BS])


def test_no_two_formats_share_a_compiled_program():
    # With equal structures jit now and then took the other format's program.
    weight = matrix((6, 40))
    structures = [jax.tree.structure(pack(weight, name=name)) for name in FORMATS]
    for first, second in itertools.combinations(structures, 2):
        assert first != second


def test_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="weight format 'q3'; known: .*fp16.*nf4"):
        pack(matrix((5, 192)), name="q3")


E, K = 6, 3


LANES, BIASED, ODD = (
    RecordLayout(64, 64),
    RecordLayout(64, 64, True),
    RecordLayout(20, 12, True),
)


# What decodes a format is tested above; here every form of the sum meets one of each
# kind: rounded results, a scale a row, codes that share a byte.
@pytest.mark.parametrize(
    "layout, method, tokens, name",
    [
        *((BIASED, "pairs", 3, name) for name in ("fp16", "int8", "nf4")),
        *slow((LANES, "pairs", 3, "int8"), (ODD, "pairs", 3, "nf4")),
        *((ODD, "blocks", 40, name) for name in ("fp16", "nf4")),
    ],
)
def test_experts_equal_those_of_the_decoded_records(layout, method, tokens, name):
    random = np.random.default_rng(1)
    x_TD = random.normal(size=(tokens, layout.d_model)).astype(np.float32)
    ids_TK = np.stack([random.permutation(E)[:K] for _ in range(tokens)])
    ids_TK[1] = E  # padding
    weights_TK = random.random((tokens, K)).astype(np.float32)
    records_ER = 0.1 * random.normal(size=(E, layout.size)).astype(np.float32)
    case = x_TD, ids_TK.astype(np.int32), weights_TK
    packed = pack_experts(records_ER, layout, name)
    got = jax.jit(lambda *case: run_packed_experts(*case, layout, method=method))(
        *case, packed
    )
    decoded_ER = np.zeros_like(records_ER)
    for expert in range(E):
        parts = [np.asarray(part) for part in load(packed, expert) if part is not None]
        flat = np.concatenate([part.reshape(-1) for part in parts])
        decoded_ER[expert, : flat.size] = flat
    want = numpy_sum((*case, decoded_ER), layout)
    digits = 3e-3 if name == "fp16" else 1e-5
    np.testing.assert_allclose(got, want, atol=digits * np.abs(want).max())
    assert not np.asarray(got)[1].any()


def test_decoded_experts_are_close_to_the_records():
    layout = RecordLayout(64, 64, True)
    records_ER = matrix((E, layout.size))
    want = jax.jit(load_expert, static_argnums=(1, 2))(records_ER, 2, layout)
    for name, digits in [("fp16", 5e-4), ("int8", 1e-2), ("nf4", 0.2)]:
        got = load(pack_experts(records_ER, layout, name), 2)
        for part, exact in zip(got, want, strict=True):
            assert part.shape == exact.shape
            assert np.abs(part - exact).max() <= digits * np.abs(exact).max()
        np.testing.assert_array_equal(got[2], want[2])  # biases are as stored
