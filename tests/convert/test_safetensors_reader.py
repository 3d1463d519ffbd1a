"""Reading safetensors: views, and every way in which a file can lie."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_edge.convert.safetensors_reader import SafetensorsFile, open_folder
from moe_edge.core.checks import CheckpointError
from tests.support.tiny_checkpoints import write_tensors

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


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "not valid JSON"),
        (b"[" * 5000, b"", "not valid JSON"),
        (b"[1]", b"", "JSON list"),
        (b'{"a": 1, "a": 2}', b"", "appears twice"),
        ({"a": {"dtype": "F32"}}, b"", "entry of a"),
        ({"a": entry(0, 4, [1], "F4")}, b"0000", "unknown dtype 'F4'"),
        ({"a": entry(0, 4, [-1])}, b"0000", "shape of tensor a"),
        ({"a": entry(0, 4, [1 << 63])}, b"0000", "shape of tensor a"),
        ({"a": entry(0, 4, ["1"])}, b"0000", "shape of tensor a"),
        ({"a": entry(4, 0, [1])}, b"0000", "begin <= end"),
        ({"a": entry(0, 4, [2])}, b"0000", "spans 4 bytes.*needs 8"),
        (
            {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
            b"0" * 12,
            "tensor b begins at byte 4 of the data, expected 8: it overlaps",
        ),
        ({"a": entry(4, 8, [1])}, b"0" * 8, "leaves a gap"),
        ({"a": entry(0, 8, [2])}, b"0000", "truncated"),
        ({"a": entry(0, 4, [1])}, b"0" * 8, "too long"),
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
    with pytest.raises(CheckpointError, match="header length .* does not fit"):
        SafetensorsFile(path)


def test_folder_with_index_finds_every_tensor(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    files = open_folder(tmp_path)
    assert set(files) == set(TENSORS)
    assert files["a"].tensor("a").tolist() == TENSORS["a"].tolist()


def test_folder_rejects_missing_shard_by_name(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=20)
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {victim.name}"):
        open_folder(tmp_path)


def test_folder_rejects_truncated_shard_by_name(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=20)
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{victim.name} is truncated"):
        open_folder(tmp_path)


def test_folder_rejects_index_that_disagrees(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=20)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["b"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="disagree on b"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "x.bin", 3])
def test_folder_rejects_index_that_leaves_the_folder(tmp_path, name):
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="plain name"):
        open_folder(tmp_path)


def test_folder_rejects_tensor_in_two_files(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "x.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="a stand both in x.*and in y"):
        open_folder(tmp_path)


def test_folder_rejects_pickled_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        open_folder(tmp_path)
