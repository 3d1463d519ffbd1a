"""GGUF headers, and every way in which a file can lie."""

import os
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.gguf_file import GgufFile
from moe_edge.convert.gguf_split import open_gguf
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from tests.support.gguf_files import CODES, text, value_bytes, write_gguf

HUGE = 1 << 62


def header(tensors=0, keys=0, version=3, magic=b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def info(name="a", dims=(32,), kind="F32", offset=0) -> bytes:
    code = CODES.get(kind, kind)
    raw = text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return raw + struct.pack("<IQ", code, offset)


def padded(*infos: bytes, data=128, keys=b"", num_keys=0) -> bytes:
    raw = header(len(infos), num_keys) + keys + b"".join(infos)
    return raw + bytes(-len(raw) % 32) + bytes(data)


def key(name: str, value: bytes) -> bytes:
    return header(0, 1) + text(name) + value


def array(kind: int, count: int, body=b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + body


def align(value) -> dict:
    return {"keys": text("general.alignment") + value_bytes(value), "num_keys": 1}


def test_values_of_all_types_are_read(tmp_path):
    said = {
        "a": True,
        "b": "é",
        "c": 7,
        "d": 1e-6,
        "e": ["x", "", "ü"],
        "f": np.array([0.5, 2]),
        "g": [True, False],
        "general.alignment": 32,
    }
    tensors = {
        "m": ("F32", (2, 3), np.arange(6, dtype="f4").tobytes()),
        "q": ("Q8_0", (2, 32), bytes(68)),
    }
    file = GgufFile(write_gguf(tmp_path / "x.gguf", said, tensors))
    arrays = {k: file.metadata.pop(k).tolist() for k in "fg"}
    assert file.metadata == {k: v for k, v in said.items() if k not in "fg"}
    assert arrays == {"f": [0.5, 2.0], "g": [True, False]}
    assert file.read("m").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.read("m", 1, 1).tolist() == [[3, 4, 5]]
    assert file.read_raw("q", 1, 1).tolist() == [0] * 34
    assert file.read("q").shape == (2, 32)
    with pytest.raises(ValueError, match="m has 24 bytes"):
        file.read("m", 1, 2)


@pytest.mark.parametrize("code, packed, value", [
    (0, b"\xff", 255), (1, b"\xff", -1), (2, b"\xff\xff", 65535), (3, b"\xff\xff", -1),
    (5, b"\xff" * 4, -1), (10, b"\xff" * 8, 2**64 - 1), (11, b"\xff" * 8, -1),
    (12, struct.pack("<d", 0.1), 0.1), (6, struct.pack("<f", 0.1), 0.1),
])  # fmt: skip
def test_numbers_of_all_widths_are_read(code, packed, value, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(key("k", struct.pack("<I", code) + packed))
    assert GgufFile(path).metadata == {"k": value}


LIES = [
    (b"", "has 0 bytes, expected a GGUF file of 24 or more"),
    (b"GGUF" + bytes(19), "has 23 bytes"),
    (header(magic=b"GGML"), "begins with b'GGML', expected b'GGUF'"),
    (header(version=1), "is GGUF version 1, expected little-endian version 2 or 3"),
    (header(version=4), "is GGUF version 4, "),
    (header(version=3 << 24), "is big-endian GGUF version 3, "),
    (header(tensors=HUGE), f"the number of tensors is {HUGE}, expected at most"),
    (header(keys=HUGE), f"the number of metadata keys is {HUGE}, expected at most"),
    (header(keys=9), "the length of metadata key 0 takes 8 bytes from byte 24, the f"),
    (header(tensors=9), "the length of the name of tensor 0 takes 8 bytes from byte 2"),
    (header(0, 1) + struct.pack("<Q", HUGE), f"metadata key 0 is {HUGE}, expected at"),
    (header(0, 1) + struct.pack("<Q", 99), "metadata key 0 takes 99 bytes from byte"),
    (header(0, 1) + text(b"\xff\xfe"), "metadata key 0 is not UTF-8 .invalid start"),
    (key("a\nb", value_bytes(1)), r"metadata key 0 is 'a\\nb', expected printable"),
    (padded(info("\x1b[1m")), r"the name of tensor 0 is '\\x1b\[1m', expected pri"),
    (key("k", struct.pack("<I", 13)), "k has value type 13, expected 0 to 12"),
    (key("k", struct.pack("<IB", 7, 2)), "k is the byte 2, expected true or false"),
    (key("k", struct.pack("<I", 8)), "the length of k takes 8 bytes from byte 37, th"),
    (key("k", struct.pack("<IQ", 8, 1 << 23)), "k takes 8388608 bytes from byte 45"),
    (key("k", array(8, HUGE)), f"the length of k is {HUGE}, expected at most"),
    (key("k", array(8, 1 << 20)), "the texts of k takes 8388608 bytes from byte 49"),
    (key("k", array(8, 1, struct.pack("<Q", 99))), r"k\[0\] takes 99 bytes from byte"),
    (key("k", array(8, 1, struct.pack("<Q", HUGE))), rf"k\[0\] is {HUGE}, expected at"),
    (key("k", array(8, 1, text(b"\xff"))), r"k\[0\] is not UTF-8"),
    (key("k", array(10, 1 << 20)), "k takes 8388608 bytes from byte 49, the file has"),
    (key("k", array(9, 1)), "k is an array of type 9, expected a flat one"),
    (header(0, 2) + 2 * (text("k") + value_bytes(1)), "metadata key k appears twice"),
    (padded(info(), info()), "tensor a appears twice"),
    (padded(info(dims=())), "tensor a has rank 0, expected 1 to 4"),
    (header(1) + text("a") + struct.pack("<I", HUGE >> 32), "a has rank 1073741824, e"),
    (padded(info(dims=(4, 0))), r"tensor a has shape \(0, 4\), which no model has"),
    (padded(info(dims=(HUGE, HUGE))), rf"has shape \({HUGE}, {HUGE}\), which no model"),
    (padded(info(kind="Q8_K")), "a has type Q8_K; known: F32, .*, Q4_K, Q5_K, Q6_K, "),
    (padded(info(kind="IQ2_XXS")), "tensor a has type IQ2_XXS; known: F32, F16, BF16"),
    (padded(info(kind="Q4_K", dims=(96, 2))), "type Q4_K has rows of 96, expected a m"),
    (padded(info(kind=999)), "tensor a has type number 999; known: F32"),
    (
        padded(info(kind="Q8_0", dims=(48, 2))),
        "type Q8_0 has rows of 48, expected a mu",
    ),
    (padded(info(offset=8)), "tensor a is at offset 8, expected a multiple of 32"),
    (padded(info(), info("b", offset=64)), "b begins at byte 160, inside a, which end"),
    (padded(info(), info("b")), "tensor b begins at byte 96, inside a, which ends at"),
    (padded(info(), data=127), r"tensor a ends at byte 192, the file has 191; copy"),
    (padded(info(offset=1 << 63)), "tensor a ends at byte 9223372036854776000, t"),
    (padded(info(dims=(1 << 40,))), "tensor a ends at byte 4398046511"),
    (padded(info(), **align(24)), "general.alignment is 24, expected a power of two"),
    (padded(info(), **align(0)), "general.alignment is 0, expected a power of two"),
    (padded(info(), **align("x")), "general.alignment is 'x', expected a power of tw"),
]


@pytest.mark.parametrize(
    "content, message", LIES, ids=[str(i) for i in range(len(LIES))]
)
def test_lies_are_refused_in_one_line_at_once(content, message, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start_s = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start_s < 1
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(path, tmp_path / "ours", progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["x.gguf"]


def test_every_truncation_of_a_header_is_refused(tmp_path):
    said = {"a": "text", "b": [1, 2], "c": ["x", "y"], "d": 0.5}
    tensors = {"m": ("F32", (2, 3), bytes(24))}
    whole = write_gguf(tmp_path / "x.gguf", said, tensors).read_bytes()
    for length in range(len(whole) - 8):  # 8: padding behind the tensor
        (tmp_path / "x.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated|has .* bytes"):
            GgufFile(tmp_path / "x.gguf")


def test_random_damage_never_raises_anything_else(tmp_path):
    said = {
        "a": "text",
        "b": [1, 2],
        "c": ["x", "y"],
        "d": 0.5,
        "general.alignment": 32,
    }
    tensors = {"m": ("F32", (2, 3), bytes(24)), "n": ("Q8_0", (32,), bytes(34))}
    path = tmp_path / "x.gguf"
    whole = np.frombuffer(write_gguf(path, said, tensors).read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1000):
        damaged = whole.copy()
        where = rng.integers(0, len(whole) - 96, rng.integers(1, 4))
        damaged[where] = rng.integers(0, 256, len(where))
        path.write_bytes(damaged.tobytes())
        try:
            file = GgufFile(path)
        except CheckpointError:
            refused += 1
        else:
            for name in file.tensors:
                file.read(name)
    assert refused > 300


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is not a folder or GGUF file"):
        open_checkpoint(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="cannot read .*gone: No such file"):
        GgufFile(tmp_path / "gone")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {}, {"m": ("F32", (32,), bytes(128))})
    file = GgufFile(path)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=re.escape(f"{path} became shorter")):
        file.read("m")


def parts(folder, **changes):
    """Two files of one model: 2 + 1 tensors; `changes` of the second one's metadata."""
    one = {"m": ("F32", (2, 3), np.arange(6, dtype="f4").tobytes())}
    two = {"n": ("Q8_0", (2, 32), bytes(68)), "o": ("F32", (1,), bytes(4))}
    common = {"split.count": 2, "split.tensors.count": 3}
    said = {"a": 1, "split.no": 0} | common
    first = write_gguf(folder / "x-00001-of-00002.gguf", said, one)
    said = {"split.no": 1} | common | changes
    write_gguf(folder / "x-00002-of-00002.gguf", said, two)
    return first


def test_parts_of_a_model_are_one_file(tmp_path):
    first = parts(tmp_path)
    file = open_gguf(first)
    assert (file.metadata["a"], sorted(file.tensors)) == (1, ["m", "n", "o"])
    assert file.read("m", 1, 1).tolist() == [[3, 4, 5]]
    assert file.read("n").shape == (2, 32) and file.read("o").tolist() == [0]
    other = tmp_path / "x-00002-of-00002.gguf"
    other.write_bytes(other.read_bytes()[:-32])
    with pytest.raises(CheckpointError, match=re.escape(f"{other} is damaged")):
        open_gguf(first)
    with pytest.raises(CheckpointError, match=re.escape(f"{other} became shorter")):
        file.read("o")


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    first, second = parts(tmp_path), tmp_path / "x-00002-of-00002.gguf"
    with pytest.raises(
        CheckpointError, match=f"name the first, {re.escape(str(first))}"
    ):
        open_gguf(second)
    parts(tmp_path, **{"split.no": 0})
    with pytest.raises(
        CheckpointError, match="says it is part 0 of 2.*, expected 1 of 2"
    ):
        open_gguf(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="tensor m is in another part of the mo"):
        open_gguf(first)
    second.unlink()
    with pytest.raises(
        CheckpointError, match="cannot read .*x-00002-of-00002.gguf: No"
    ):
        open_gguf(first)
    write_gguf(second, {"split.no": 1, "split.count": 2}, {})
    with pytest.raises(CheckpointError, match=r"have 1 tensors, expected 3 \(split"):
        open_gguf(first)
    renamed = first.rename(tmp_path / "y.gguf")
    with pytest.raises(CheckpointError, match="ends in -00001-of-00002.gguf; give the"):
        open_gguf(renamed)
    for wrong in (-1, "x", 1 << 20):
        write_gguf(renamed, {"split.count": wrong}, {})
        with pytest.raises(
            CheckpointError, match=f"split.count is {wrong!r}, expected"
        ):
            open_gguf(renamed)
