"""Reading safetensors: views, and every way in which a file can lie."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_edge.convert.safetensors_reader import SafetensorsFile
from moe_edge.core.checks import CheckpointError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.float16),
    "c": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "empty": np.zeros((0, 4), np.float32),
}


def write_raw(path, header, data=b""):
    """A file from a header (dict or bytes) and its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_file_written_by_library_is_read(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, array in TENSORS.items():
        view = file.tensor(name)
        assert view.dtype == array.dtype and view.shape == array.shape
        assert view.tobytes() == array.tobytes()
        assert not view.size or not view.flags.writeable
    out = np.empty(6, np.float32)
    file.read_into("a", out)
    assert out.tolist() == TENSORS["a"].reshape(-1).tolist()
    file.release()
    assert file.tensor("a").tolist() == TENSORS["a"].tolist()


TWICE = b'{"a": %s, "a": %s}' % (2 * (json.dumps(entry(0, 4, [1])).encode(),))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "invalid JSON in header: key must"),
        (b"[" * 5000, b"", "invalid JSON in header"),
        (b"[1]", b"", "invalid type: sequence"),
        (TWICE, b"0000", "header of .*x.safetensors .*: 'a' occurs twice"),
        ({"a": {"dtype": "F32"}}, b"", "missing field `shape`"),
        ({"a": entry(0, 4, [8], "F4")}, b"0000", "unknown dtype 'F4'"),
        ({"a": entry(0, 4, [-1])}, b"0000", "invalid value: integer `-1`"),
        ({"a": entry(0, 4, [1 << 63])}, b"0000", "overflow computing buffer"),
        ({"a": entry(0, 4, ["1"])}, b"0000", "invalid type: string"),
        ({"a": entry(4, 0, [1])}, b"0000", "invalid offset for tensor `a`"),
        ({"a": entry(0, 4, [2])}, b"0000", "invalid shape, data type, or offset"),
        (
            {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
            b"0" * 12,
            "invalid offset for tensor `b`",
        ),
        ({"a": entry(4, 8, [1])}, b"0" * 8, "invalid offset for tensor `a`"),
        ({"a": entry(0, 8, [2])}, b"0000", "damaged or truncated: incomplete metadata"),
        ({"a": entry(0, 4, [1])}, b"0" * 8, "file not fully covered; copy it again"),
    ],
)
def test_file_rejects_bad_header(tmp_path, header, data, message):
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"abc", (1 << 62).to_bytes(8, "little")])
def test_file_rejects_bad_header_length(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="header too (small|large)"):
        SafetensorsFile(path)
