"""Hashes of a checkpoint's files: what they follow, and when they are computed."""

import json
import os
import shutil

import numpy as np
import pytest

from moe_edge.checkpoint import dense
from moe_edge.cluster import content
from moe_edge.cluster.content import content_of
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from tests.support.conversion import convert
from tests.support.gguf_files import from_hf, write_gguf
from tests.support.old_checkpoints import as_version_1
from tests.support.refactored import write_random
from tests.support.tiny_checkpoint import CONFIG, tiny_tensors

PADDING = 2 << 20  # more than a glance at a file's beginning would show


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of the test's own, in which files count as settled at once."""
    monkeypatch.setenv(content.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(content, "_SETTLED_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("content") / "ours"
    convert(tiny, folder)
    return folder


@pytest.fixture
def ours(converted, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(converted, tmp_path / "ours")


def hashes(path) -> dict[str, str]:
    return content_of(open_checkpoint(path))


def changed(path, before: dict[str, str]) -> set[str]:
    after = hashes(path)
    assert after.keys() == before.keys()
    return {name for name in before if before[name] != after[name]}


def flip(path, at: int) -> None:
    """Flips the bits of one byte; negative: from the end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 255]))


def test_hugging_face_folders_are_hashed_to_their_last_byte(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "copy")
    # A header may be padded with spaces: the tensors begin beyond 2 MiB.
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size] + b" " * PADDING
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    (copy / "README.md").write_text("of no matter")
    before = hashes(copy)
    assert set(before) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert hashes(tiny)["tokenizer.json"] == before["tokenizer.json"]
    flip(file, -5)
    assert changed(copy, before) == {"model.safetensors"}
    before = hashes(copy)
    (copy / "README.md").write_text("of none at all")
    assert not changed(copy, before)


def test_gguf_files_are_hashed_to_their_last_byte_whatever_their_name(tmp_path):
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in paths:
        write_gguf(path, *from_hf(CONFIG, tiny_tensors()))
    before = hashes(paths[0])
    assert before == hashes(paths[1])
    flip(paths[1], -5)
    assert changed(paths[1], before) == {"GGUF file"}


def test_two_conversions_of_one_model_hold_the_same(tiny, ours, tmp_path):
    moved = shutil.copytree(tiny, tmp_path / "elsewhere" / "tiny")
    convert(moved, tmp_path / "again")
    before = hashes(ours)
    assert before == hashes(tmp_path / "again")
    assert {"manifest.json", "dense/top", "dense/layer_001"} < set(before)
    assert {"experts/layer_000.bin", "hf/tokenizer.json"} < set(before)


@pytest.mark.parametrize("gate", [None, "linear"])
def test_a_conversion_of_an_earlier_version_holds_the_same(gate, ours, tiny, tmp_path):
    """Format version 2 adds 64 bytes to each expert file."""
    folder = ours if gate is None else write_random(tiny, tmp_path / "split", gate)
    old = as_version_1(shutil.copytree(folder, tmp_path / "old"))
    file = "experts/layer_001.bin"
    assert (folder / file).stat().st_size == (old / file).stat().st_size + 64
    assert hashes(old) == hashes(folder)
    flip(old / file, -1)
    assert hashes(old)[file] != hashes(folder)[file]


def test_a_flipped_byte_of_ours_is_noticed_in_experts_and_dense_weights(ours):
    as_version_1(ours)  # of later versions reading itself refuses it
    before = hashes(ours)
    flip(ours / "experts" / "layer_001.bin", -5)
    assert changed(ours, before) == {"experts/layer_001.bin"}
    before, reader = hashes(ours), open_checkpoint(ours)
    arrays = reader.dense(0)
    arrays["attn.q"].view(np.uint8)[0, 0] ^= 1
    shutil.rmtree(ours / "dense" / "layer_000")
    dense.DenseWriter(ours).save(0, arrays)
    assert changed(ours, before) == {"dense/layer_000"}


def test_of_a_manifest_what_it_says_of_the_model_counts(tiny, tmp_path):
    path = write_random(tiny, tmp_path / "ours", "proxy_pattern") / "manifest.json"
    before, manifest = hashes(path.parent), json.loads(path.read_text())
    manifest["source"] = {"hf_path": "/elsewhere"}
    manifest["refactor"]["profile"] = "another"
    path.write_text(json.dumps(manifest))
    assert not changed(path.parent, before)
    manifest["refactor"]["rank_shares"][0][0] += 0.125
    path.write_text(json.dumps(manifest))
    assert changed(path.parent, before) == {"manifest.json"}


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of what is hashed from now on."""
    names, hash_one = [], content._hash

    def noted(part, done):
        names.append(part.name)
        return hash_one(part, done)

    monkeypatch.setattr(content, "_hash", noted)
    return names


def test_what_has_not_changed_is_hashed_once(ours, cache, hashed):
    before = hashes(ours)
    assert sorted(hashed) == sorted(before)
    hashed.clear()
    assert hashes(ours) == before and not hashed
    flip(ours / "experts" / "layer_000.bin", 3)
    assert changed(ours, before) == {"experts/layer_000.bin"} == set(hashed)
    (kept,) = cache.rglob("*.json")
    for damaged in ("{", "[]", '{"files": {"manifest.json": 3}}'):
        kept.write_text(damaged)
        hashed.clear()
        hashes(ours)
        assert sorted(hashed) == sorted(before)


def test_what_was_hashed_before_an_interrupt_is_kept(ours, hashed, monkeypatch):
    hash_one = content._hash

    def interrupted(part, done):
        if part.name == "experts/layer_001.bin":
            raise KeyboardInterrupt
        return hash_one(part, done)

    with monkeypatch.context() as patch:
        patch.setattr(content, "_hash", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hashes(ours)
    assert "experts/layer_000.bin" in hashed
    hashed.clear()
    hashes(ours)
    assert hashed == ["experts/layer_001.bin"]


def test_files_that_have_just_changed_are_hashed_again(ours, hashed, monkeypatch):
    """A file system's clock may not tell two changes apart."""
    monkeypatch.setattr(content, "_SETTLED_S", 3600.0)
    before = hashes(ours)
    hashed.clear()
    assert hashes(ours) == before and sorted(hashed) == sorted(before)


def test_without_a_cache_folder_hashes_are_computed_again(ours, cache, capsys):
    cache.write_text("a file where the folder would be")
    before = hashes(ours)
    assert hashes(ours) == before
    text = f"cannot be kept in {cache}/checkpoints (Not a directory)"
    assert text in capsys.readouterr().err


def test_a_file_that_goes_meanwhile_is_named(ours):
    reader = open_checkpoint(ours)
    (ours / "experts" / "layer_001.bin").unlink()
    with pytest.raises(CheckpointError, match="cannot read .*layer_001.bin: No such"):
        content_of(reader)
