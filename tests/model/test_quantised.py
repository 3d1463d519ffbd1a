"""Blocks of quantised weights, and the records that are made of them."""

import jax
import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.model.packed import Blocks
from moe_edge.model.quantised import (
    BLOCK_BYTES,
    IN_EIGHTS,
    KINDS,
    SCALE_BYTES,
    Matrix,
    bytes_per_weight,
    decode,
    interleave,
    kind_of,
    row_bytes,
    scales,
)
from moe_edge.model.quantising import encode
from moe_edge.model.record import RecordLayout
from tests.support.block_formats import decode_slowly, encode_slowly, many_weights


@pytest.mark.parametrize("kind", KINDS)
def test_encode_gives_the_bytes_of_the_reference(kind):
    weights = many_weights()
    stored = encode(kind, weights)
    assert stored.dtype == np.uint8 and stored.shape == (12, 3 * BLOCK_BYTES[kind])
    want = np.stack([encode_slowly(kind, row) for row in weights])
    np.testing.assert_array_equal(stored, want)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_is_exact_of_any_bytes(kind):
    """Also of scales below the normal numbers of float16, on both sides."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (9, 5, BLOCK_BYTES[kind]), np.uint8)
    if kind == "mxfp4":  # values that float32 holds, as normal numbers
        blocks[..., 0] = rng.integers(2, 253, (9, 5))
        blocks[0, 0] = [252] + 16 * [0x7F]
        blocks[0, 1] = [2] + 16 * [0x19]
    else:
        blocks[..., 1] &= 0x3F  # finite scales, positive: up to 2
        blocks[1, :, 1], blocks[2, :, 0:2] = 0, 0
        blocks[3, :, 1] |= 0x80
    rows = blocks.reshape(9, -1)
    want = np.stack([decode_slowly(kind, row) for row in rows])
    np.testing.assert_array_equal(decode(kind, rows), want)
    found = jax.jit(lambda r: decode(kind, r))(rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(found), want)


def test_mxfp4_keeps_what_is_of_the_format():
    """Bit by bit, also where a block has a larger scale than its weights need."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (500, 17), np.uint8)
    blocks[:, 0] = rng.integers(8, 250, 500)
    blocks[:50, 1:] &= 0xBB  # none of the three largest magnitudes
    blocks[50:60, 1:] = 0x80  # 0 and -0
    values = decode("mxfp4", blocks)
    again = decode("mxfp4", encode("mxfp4", values))
    assert again.tobytes() == values.tobytes()


@pytest.mark.parametrize("kind, share", [("q8_0", 1 / 254), ("q4_0", 1 / 16)])
def test_weights_come_back_within_half_a_step(kind, share):
    weights = many_weights()[[0, 1, 7]]
    blocks, back = (
        a.reshape(-1, 32) for a in (weights, decode(kind, encode(kind, weights)))
    )
    steps = share * np.abs(blocks).max(axis=1, keepdims=True)
    # q4_0 has no code at the other end of the range: half a step more there.
    limit = (2.01 if kind == "q4_0" else 1.13) * steps  # a float16 rounds, too
    assert (np.abs(back - blocks) <= limit).all()
    again = decode("q8_0", encode("q8_0", back)) if kind == "q8_0" else back
    np.testing.assert_array_equal(again, back)


def test_sizes_that_no_blocks_fill_are_refused():
    assert [row_bytes(kind, 64) for kind in KINDS] == [68, 36, 34]
    assert [bytes_per_weight(kind) for kind in KINDS] == [1.0625, 0.5625, 0.53125]
    with pytest.raises(ConfigError, match="blocks of 32, .* width of 48"):
        row_bytes("q8_0", 48)
    with pytest.raises(ConfigError, match="width of 33"):
        encode("q4_0", np.zeros((2, 33), np.float32))
    with pytest.raises(ConfigError, match="35 bytes are no whole blocks of q8_0"):
        decode("q8_0", np.zeros((2, 35), np.uint8))
    with pytest.raises(ConfigError, match="quantised format.*q5_0"):
        decode("q5_0", np.zeros((2, 34), np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_eight_rows_stand_interleaved(kind):
    """Scales of a block, then four bytes of codes of each row in turn."""
    rng, size = np.random.default_rng(4), SCALE_BYTES[kind]
    rows = rng.integers(0, 256, (16, 3 * BLOCK_BYTES[kind]), np.uint8)
    rows.reshape(16, 3, -1)[..., size - 1] &= 0x3F  # finite
    eights, want = interleave(kind, rows), []
    for first in (0, 8):
        for block in range(3):
            start = block * BLOCK_BYTES[kind]
            eight = [row[start : start + BLOCK_BYTES[kind]] for row in rows[first:][:8]]
            want += [each[:size] for each in eight]
            for code in range(size, BLOCK_BYTES[kind], 4):
                want += [each[code : code + 4] for each in eight]
    np.testing.assert_array_equal(eights, np.concatenate(want).reshape(2, -1))
    matrix = Matrix(kind, rows).interleaved()
    assert matrix.kind == IN_EIGHTS[kind] and matrix.shape == (16, 96)
    values = decode(kind, rows)
    np.testing.assert_array_equal(matrix.decode(), values)
    np.testing.assert_array_equal(matrix.part(8, 8).decode(), values[8:])
    ids = np.array([[3, 15], [8, 0]])
    device = Blocks(jax.numpy.array(eights), 96, matrix.kind)
    np.testing.assert_array_equal(jax.jit(lambda m: m.decode())(device), values)
    np.testing.assert_array_equal(jax.jit(lambda m, i: m[i])(device, ids), values[ids])
    assert np.isfinite(scales(matrix.kind, eights)).all()
    odd = Matrix(kind, rows[:15])
    assert odd.interleaved() is odd
    assert kind_of(eights.shape, (16, 96)) == IN_EIGHTS[kind]
    assert kind_of(odd.rows.shape, (15, 96)) == kind
    assert kind_of((15, 96), (15, 96)) is None


@pytest.mark.parametrize("kind", [*KINDS, "q4_0x8"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_record_holds_its_parts(kind, has_bias):
    layout, E = RecordLayout(64, 32, has_bias, kind), 3
    plain = layout.unquantised
    rng = np.random.default_rng(2)
    values = rng.normal(size=(E, plain.size)).astype(np.float32)
    records = np.stack([layout.encode(one) for one in values])
    per_weight = BLOCK_BYTES[kind] / 32
    biases = 4 * (2 * 32 + 64) if has_bias else 0
    assert layout.num_values == 3 * 64 * 32 * per_weight + biases
    assert records.shape == (E, layout.size) and records.dtype == np.uint8
    assert layout.size == layout.num_bytes(np.uint8) and layout.size % 64 == 0
    assert layout.value_dtype(np.uint8) == np.float32
    for name, shape in layout.shapes.items():
        part = plain.part(values, name)
        want = part if len(shape) == 1 else decode(kind, encode(kind, part))
        found = layout.part(records, name)
        assert found.shape == (E, *shape)
        np.testing.assert_array_equal(found, want)
        traced = jax.jit(lambda r, name=name: layout.part(r, name))(records)
        np.testing.assert_array_equal(np.asarray(traced), want)
    assert all(offset % 64 == 0 for offset in list(layout.offsets.values())[:4])


def test_the_size_that_blocks_do_not_fill_is_named():
    with pytest.raises(ConfigError, match="with 40 width cannot be q8_0"):
        RecordLayout(40, 32, False, "q8_0")
    with pytest.raises(ConfigError, match="with 20 neurons cannot be q4_0"):
        RecordLayout(64, 20, False, "q4_0")
