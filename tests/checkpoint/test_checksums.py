"""Damaged, exchanged and replaced files of a checkpoint of ours are refused."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_edge.checkpoint.checksums import item_crc32
from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert.convert import convert_checkpoint, verify_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from moe_edge.engine.load import check_checkpoint
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.weights import load_weights
from moe_edge.offload.store import MEMORIES, HostStore
from tests.support.old_checkpoints import as_version_1
from tests.support.tiny_checkpoints import hf_folder

RECORD = 2880 * 4  # bytes of one


def expert_file(folder, layer):
    return folder / "experts" / f"layer_{layer:03d}.bin"


def swap(one, other):
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def edit_checksums(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["checksums"])
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("memory", MEMORIES)
def test_expert_files_of_two_layers_exchanged_are_refused_in_every_memory(ours, memory):
    swap(expert_file(ours, 0), expert_file(ours, 2))
    with pytest.raises(
        CheckpointError, match=r"layer_000.bin holds the experts of layer 2, expected 0"
    ):
        HostStore(open_checkpoint(ours), memory)
    with pytest.raises(CheckpointError, match=r"layer_000.bin .* layer 2"):
        check_checkpoint(ours, False, OffloadOptions(memory=memory))  # --dry_run


def test_expert_file_of_another_checkpoint_is_refused(ours, tmp_path):
    other = hf_folder(tmp_path / "hf", "qwen2_moe", tie_word_embeddings=False)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.mlp.experts.4.up_proj.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors")
    convert_checkpoint(other, tmp_path / "other", progress=False)
    shutil.copyfile(expert_file(tmp_path / "other", 2), expert_file(ours, 2))
    with pytest.raises(CheckpointError, match=r"layer_002.bin is of another checkp"):
        open_checkpoint(ours)


@pytest.mark.parametrize("memory", ["host", "pinned"])
def test_two_records_exchanged_are_refused(ours, memory):
    path = expert_file(ours, 2)
    raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
    records = raw[: 6 * RECORD].reshape(6, RECORD)
    records[[1, 4]] = records[[4, 1]]
    path.write_bytes(raw)
    message = r"layer_002.bin: record 1 has CRC-32 \w{8}, expected \w{8}"
    with pytest.raises(CheckpointError, match=message):
        HostStore(open_checkpoint(ours), memory)
    with pytest.raises(CheckpointError, match=message):  # the resident engine
        load_weights(open_checkpoint(ours))
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(ours)


def test_a_flipped_bit_of_a_record_is_refused(ours):
    flip(expert_file(ours, 0), 5 * RECORD + 100)
    reader = open_checkpoint(ours)
    with pytest.raises(CheckpointError, match=r"layer_000.bin: record 5 has CRC-32"):
        HostStore(reader)
    one = np.empty((1, reader.layout.size), reader.dtype)
    reader.read_experts(0, 4, one)  # its neighbours are as they were
    with pytest.raises(CheckpointError, match="record 5"):
        reader.read_experts(0, 5, one)
    with pytest.raises(CheckpointError, match="record 5"):
        open_checkpoint(ours, np.dtype(np.float16)).read_experts(
            0, 5, one.astype(np.float16)
        )


@pytest.mark.parametrize("at", [-64, -50, -1])
def test_a_flipped_bit_after_the_records_is_refused(ours, at):
    flip(expert_file(ours, 2), at)
    with pytest.raises(CheckpointError, match=r"layer_002.bin"):
        open_checkpoint(ours)


def test_a_flipped_bit_of_dense_weights_is_refused(ours):
    files = [p for p in (ours / "dense" / "layer_001").rglob("*") if p.is_file()]
    flip(max(files, key=lambda p: p.stat().st_size), 4000)
    with pytest.raises(CheckpointError, match=r"layer_001 has CRC-32 \w{8}, expected"):
        load_weights(open_checkpoint(ours))


def test_a_dense_item_is_its_names_dtypes_shapes_and_bytes():
    values = np.arange(1, 5, dtype=np.uint16)
    same = {"a": values}, {"a": values.copy()}
    assert item_crc32(same[0]) == item_crc32(same[1])
    others = (
        {"b": values},
        {"a": values.view(ml_dtypes.bfloat16)},
        {"a": values.reshape(2, 2)},
        {"a": values[::-1]},
        {"a": values, "b": values},
    )
    found = {item_crc32(item) for item in (same[0], *others)}
    assert len(found) == 1 + len(others)


def test_dense_weights_of_two_layers_exchanged_are_refused(ours):
    swap(ours / "dense" / "layer_000", ours / "dense" / "layer_002")
    with pytest.raises(CheckpointError, match=r"layer_000 has CRC-32 \w{8}, expected"):
        load_weights(open_checkpoint(ours))


def test_old_checkpoints_load_and_say_what_is_not_checked(ours, converted, capsys):
    as_version_1(ours)
    flip(expert_file(ours, 0), 100)
    reader, fresh = open_checkpoint(ours), open_checkpoint(converted)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"{reader.path} is of format version 1, without checksums" in printed
    HostStore(reader), load_weights(reader)
    assert reader.experts(2).tobytes() == fresh.experts(2).tobytes()
    open_checkpoint(ours)
    assert not capsys.readouterr().err  # once a process


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: sums.pop("dense"), "checksums of the manifest"),
        (
            lambda sums: sums["experts"].pop("2"),
            "experts are of 0, expected 0, 2",
        ),
        (lambda sums: sums["experts"].update({"2": "00000000"}), "layer 2 .* 1, exp"),
        (lambda sums: sums["experts"].update({"2": "x"}), "checksums of the manifest"),
        (lambda sums: sums["experts"].update({"2": 5}), "checksums of the manifest"),
        (
            lambda sums: sums["experts"].update({"2": " ".join(["-1234567"] * 6)}),
            "'-1234567' is no CRC-32 of eight hexadecimal digits",
        ),
        (
            lambda sums: sums["dense"].update({"0": "123456789"}),
            "'123456789' is no CRC",
        ),
        (lambda sums: sums["dense"].update({"0": None}), "checksums of the manifest"),
        (
            lambda sums: sums["dense"].pop("top"),
            "dense are of 0, 1, 2, head, expected top, head",
        ),
    ],
)
def test_checksums_that_do_not_fit_the_model_are_refused(ours, change, message):
    edit_checksums(ours, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(ours)


def test_a_manifest_of_version_2_without_checksums_is_refused(ours):
    path = ours / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksums"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="lacks checksums"):
        open_checkpoint(ours)


def test_a_layer_is_checked_in_parts_of_any_size(converted, monkeypatch):
    """Reading in parts, by several threads, gives the bytes of the file."""
    from moe_edge.checkpoint import experts_file

    reader = open_checkpoint(converted)
    assert isinstance(reader, CheckpointReader)
    want = expert_file(converted, 2).read_bytes()[: 6 * RECORD]
    for size in (1, 2 * RECORD, 1 << 30):
        monkeypatch.setattr(experts_file, "PART_BYTES", size)
        records = np.empty((6, reader.layout.size), reader.dtype)
        reader.read_experts(2, 0, records)
        assert records.tobytes() == want == reader.experts(2).tobytes()
        assert experts_file.record_crcs(records) == reader.checksums.experts[2]
