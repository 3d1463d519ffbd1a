"""Shards and their index, and every way in which they can disagree."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_edge.convert.safetensors_reader import open_folder
from moe_edge.core.checks import CheckpointError
from tests.support.tiny_checkpoints import write_tensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


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
    with pytest.raises(CheckpointError, match=f"{victim.name} is damaged or truncated"):
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
