import json
import struct

import numpy as np
import pytest

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Call
from moe_edge.cluster.transport.wire import BlockRequest, Kind, WireError
from moe_edge.cluster.transport.wire_control import (
    MAX_JSON_BYTES,
    decode_control,
    encode_control,
)


def make_call(tokens=3, width=5, pairs=4, **changed) -> Call:
    rng = np.random.default_rng(0)
    values = dict(
        layer=7,
        bucket=4,
        version=9,
        x_TD=rng.normal(size=(tokens, width)).astype(np.float32),
        token_P=rng.integers(0, tokens, pairs).astype(np.uint16),
        block_P=rng.integers(0, 60, pairs).astype(np.uint16),
    )
    return Call(**(values | changed))


def decode(frame: bytes):
    """What a reader makes of a message, whichever it is."""
    kind = wire.read_prefix(frame).kind
    match kind:
        case Kind.CALL:
            return wire.decode_call(frame)
        case Kind.ROWS:
            return wire.decode_rows(frame)
        case Kind.BLOCK:
            return wire.decode_block(frame)
        case Kind.CONTROL | Kind.POST | Kind.REPLY:
            return decode_control(frame)
        case Kind.ON_ERROR | Kind.REFUSED:
            return wire.decode_text(frame)
    return None


ARRAYS = {
    "none": np.zeros((0, 3), np.int64),
    "bits": np.array([True, False, True]),
    "one": np.array(2.5),
    "table": np.arange(6, dtype=np.uint16).reshape(2, 3),
}
FRAMES = {
    "call": wire.encode_call(1, make_call()),
    "rows": wire.encode_rows(3, np.ones((2, 5), np.float32)),
    "not_here": wire.prefix(Kind.NOT_HERE, 4),
    "block": wire.encode_block(5, BlockRequest(1, 2, 64)),
    "control": encode_control(Kind.CONTROL, 7, "n", {"a": [1, None]}, ARRAYS),
    "on_error": wire.encode_text(Kind.ON_ERROR, 8, "why"),
}


@pytest.mark.parametrize("pairs", [1, 4])
def test_call_returns_unchanged(pairs):
    call = make_call(pairs=pairs)
    frame = wire.encode_call(2**64 - 1, call)
    kind, flags, number = wire.read_prefix(frame)
    assert (kind, flags, number) == (Kind.CALL, 0, 2**64 - 1)
    got = wire.decode_call(frame)
    for name in Call.__slots__:
        np.testing.assert_array_equal(getattr(got, name), getattr(call, name))
        if name[-2:] in ("_P", "TD"):
            assert getattr(got, name).dtype == getattr(call, name).dtype


def test_call_golden():
    call = make_call(
        tokens=1,
        width=1,
        pairs=1,
        x_TD=np.ones((1, 1), np.float32),
        token_P=np.zeros(1, np.uint16),
        block_P=np.full(1, 258, np.uint16),
    )
    assert wire.encode_call(5, call) == (
        b"MoEc\3\0\1\0"
        + b"\5\0\0\0\0\0\0\0"
        + b"\7\0\0\0\4\0\0\0\x09\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0"
        + b"\0\0\x80\x3f\0\0\2\1"
    )


def test_call_of_one_token_adds_little_to_its_states():
    # A decode step at D = 192 with 8 pairs: the bytes that are no states or rows.
    call = make_call(1, 192, 8)
    rows = wire.encode_rows(0, np.zeros((8, 192), np.float32))
    sent = len(wire.encode_call(0, call)) + len(rows)
    assert sent <= 1.05 * 4 * 192 * 9


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"x_TD": np.zeros((3, 5))}, "x float64.3, 5."),
        ({"x_TD": np.zeros(3, np.float32)}, "x float32.3."),
        ({"x_TD": np.zeros((5, 3), np.float32).T}, "C-contiguous"),
        ({"x_TD": np.zeros((3, 0), np.float32)}, "x float32.3, 0."),
        ({"token_P": np.zeros(4, np.int32)}, "token int32.4."),
        ({"token_P": np.zeros(3, np.uint16)}, "token uint16.3., block uint16.4."),
        ({"layer": -1}, r"layer, bucket and version \(-1, 4, 9\)"),
        ({"version": 2**32}, r"\(7, 4, 4294967296\)"),
    ],
)
def test_encode_call_rejects(changed, text):
    with pytest.raises(WireError, match=text):
        wire.encode_call(0, make_call(**changed))


def changed_call(at: int, form: str, value: int) -> bytes:
    frame = bytearray(FRAMES["call"])
    struct.pack_into("<" + form, frame, at, value)
    return bytes(frame)


@pytest.mark.parametrize(
    "frame, text",
    [
        (b"", "message of 0 bytes, expected 16"),
        (b"GET / HTTP/1.1\r\n\r\n", "begins with b'GET ', expected b'MoEc'"),
        (changed_call(4, "H", 1), "wire version 1, expected 3"),
        (changed_call(6, "B", 99), "kind 99, expected 1 to 10"),
        (changed_call(7, "B", 1), "CALL with flags 0x1, expected none"),
        (FRAMES["call"][:40], "CALL of 40 bytes with 3 tokens and 4 pairs: -16 bytes"),
        (FRAMES["call"][:39], "CALL of 39 bytes, expected 40 or more"),
        (FRAMES["call"] + b"\0", "61 bytes of states are no rows"),
        (changed_call(28, "I", 0), "CALL of 0 tokens, 4 pairs"),
        (changed_call(28, "I", 65537), "CALL of 65537 tokens"),
        (changed_call(32, "I", 0), "3 tokens, 0 pairs"),
        (changed_call(32, "I", 2**32 - 1), "4294967295 pairs"),
        (changed_call(20, "I", 0), "4 pairs and bucket 0"),
        (changed_call(100, "H", 3), "names token 3, expected less than 3"),
        (FRAMES["rows"][:-4], "ROWS of 60 bytes, expected 24 and 2 x 5"),
        (FRAMES["rows"][:20], "ROWS of 20 bytes, expected 24 or more"),
        (FRAMES["block"][:-1], "BLOCK of 31 bytes, expected 32"),
        (FRAMES["block"] + b"\0", "BLOCK of 33 bytes, expected 32"),
        (FRAMES["control"][:20], "control message of 20 bytes"),
        (FRAMES["control"][:30], "states 111 bytes of JSON"),
        (FRAMES["control"] + bytes(8), "'n': 176 bytes, expected 168"),
        (FRAMES["control"][:-8], r"'n': array 'table' \(2, 3\) ends beyond"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_decode_rejects(frame, text):
    with pytest.raises(WireError, match=text):
        decode(frame)


@pytest.mark.parametrize("name", FRAMES)
def test_damaged_messages_raise_wire_errors_only(name):
    rng = np.random.default_rng(0)
    frame = FRAMES[name]
    refused = 0
    pieces = [frame[:length] for length in range(len(frame))]
    for _ in range(1500):
        damaged = bytearray(frame)
        for at in rng.integers(0, len(frame), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        pieces.append(bytes(damaged))
    pieces += [rng.bytes(size) for size in range(60)]
    pieces += [frame[:8] + rng.bytes(len(frame) - 8) for _ in range(200)]
    for piece in pieces:
        try:
            decode(piece)
        except WireError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


def test_rows_return_unchanged():
    for shape in ((2, 5), (0, 5)):
        rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        got = wire.decode_rows(wire.encode_rows(3, rows))
        np.testing.assert_array_equal(got, rows)
        assert got.dtype == np.float32


@pytest.mark.parametrize(
    "rows, text",
    [
        (np.zeros((2, 3)), "rows are float64.2, 3."),
        (np.zeros(3, np.float32), "rows are float32.3."),
        (np.zeros((2, 3), np.float32).T, "expected C-contiguous"),
    ],
)
def test_encode_rows_rejects(rows, text):
    with pytest.raises(WireError, match=text):
        wire.encode_rows(0, rows)


def test_block_returns_unchanged():
    assert wire.decode_block(FRAMES["block"]) == (1, 2, 64)


def test_control_returns_unchanged():
    name, fields, arrays = decode_control(FRAMES["control"])
    assert (name, fields) == ("n", {"a": [1, None]})
    assert list(arrays) == list(ARRAYS)
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], array)
        assert arrays[key].dtype == array.dtype


@pytest.mark.parametrize(
    "fields, arrays, text",
    [
        ({"a": object()}, {}, "n: its fields are no JSON: Object of type object"),
        ({"a": "x" * MAX_JSON_BYTES}, {}, f"expected at most {MAX_JSON_BYTES}"),
        ({}, {"a": np.zeros(1, complex)}, "array a is complex128 of rank 1"),
        ({}, {"a": np.zeros((1,) * 9)}, "float64 of rank 9, expected rank 8"),
        ({}, {"a": np.array(["t"])}, "array a is str"),
    ],
)
def test_encode_control_rejects(fields, arrays, text):
    with pytest.raises(WireError, match=text):
        encode_control(Kind.POST, 0, "n", fields, arrays)


@pytest.mark.parametrize(
    "content, text",
    [
        (b"[" * 100_000, "nested deeper than 100"),
        (b'"abc"', "without .name, fields, arrays."),
        (b"{}", "without .name, fields, arrays."),
        (b"\xff", "is not UTF-8 text: byte 0"),
        (b'["n", [], []]', "name or fields are of another type"),
        (b'["n", {}, {}]', "its arrays are no list"),
        (b'["n", {}, [["a", "int8"]]]', "an array without"),
        (b'["n", {}, [["a", "object", [1]]]]', "array 'a' of dtype 'object'"),
        (b'["n", {}, [["a", ["int8"], [1]]]]', "of dtype .'int8'."),
        (b'["n", {}, [["a", "int8", [-1]]]]', r"array 'a' has shape \[-1\]"),
        (b'["n", {}, [["a", "int8", [true]]]]', r"has shape \[True\]"),
        (b'["n", {}, [["a", "int8", [1.5]]]]', r"has shape \[1.5\]"),
        (json.dumps(["n", {}, [["a", "int8", [0] + [2**39] * 7]]]), "is too large"),
        (json.dumps(["n", {}, [["a", "int8", [2**40]]]]), "has shape"),
        (json.dumps(["n", {}, [["a", "int8", [0]]] * 2]), "'n': "),
    ],
    ids=lambda value: "" if len(value) > 30 else None,
)
def test_decode_control_rejects(content, text):
    content = content.encode() if isinstance(content, str) else content
    head = wire.prefix(Kind.CONTROL, 0) + struct.pack("<I4x", len(content))
    frame = head + content + bytes(-len(content) % 8)
    with pytest.raises(WireError, match=text):
        decode_control(frame)


def test_texts_are_one_short_line():
    frame = wire.encode_text(Kind.REFUSED, 0, "wrong\x07 key ü\nsecond line")
    assert wire.decode_text(frame) == "wrong  key ü"
    frame = wire.encode_text(Kind.REFUSED, 0, "ü" * 5000)
    assert len(frame) == wire.PREFIX.size + wire.MAX_TEXT_BYTES
    assert wire.decode_text(frame).startswith("üü")
    assert wire.decode_text(frame[:16] + b"\xff\n") == "\ufffd "
