"""Reading a checkpoint of ours, and every way in which it can be damaged."""

import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorstore

from moe_edge.checkpoint import dense
from moe_edge.checkpoint.manifest import read_manifest
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.old_checkpoints import as_version_1


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v != "gone"}))


def test_layout_on_disk(converted):
    manifest = read_manifest(converted)
    assert (manifest["L"], manifest["E"], manifest["U"]) == (3, 6, 1)
    record = manifest["record"]
    assert record["order"] == ["gate", "up", "down"]
    assert record["shapes"] == {"gate": [20, 48], "up": [20, 48], "down": [48, 20]}
    assert record["bytes"] == 2880 * 4 and record["bytes"] % 64 == 0
    names = sorted(p.name for p in (converted / "experts").iterdir())
    assert names == ["layer_000.bin", "layer_002.bin"]  # layer 1 is dense
    size = (converted / "experts" / names[0]).stat().st_size
    assert size == 6 * record["bytes"] + 64  # the layer and the tag
    dense = sorted(p.name for p in (converted / "dense").iterdir())
    assert dense == ["head", "layer_000", "layer_001", "layer_002", "top"]


def test_experts_are_memory_mapped_records(converted):
    reader = open_checkpoint(converted)
    records = reader.experts(0)
    raw = (converted / "experts" / "layer_000.bin").read_bytes()
    assert records.tobytes() == raw[:-64]
    assert not records.flags.writeable
    base = records
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    some = np.empty((2, reader.layout.size), np.float32)
    reader.read_experts(0, 3, some)
    np.testing.assert_array_equal(some, records[3:5])


def test_reader_casts_on_request(converted):
    reader = open_checkpoint(converted, np.dtype(ml_dtypes.bfloat16))
    plain = open_checkpoint(converted)
    assert reader.experts(0).dtype == reader.top()["embed"].dtype == reader.dtype
    np.testing.assert_array_equal(
        reader.experts(2), plain.experts(2).astype(ml_dtypes.bfloat16)
    )


def test_sub_experts_are_rows_of_their_own(ours):
    """A refactored checkpoint: U records per expert, of F / U neurons each."""
    as_version_1(ours)  # CRCs would be of the records as they were
    manifest = read_manifest(ours)
    width = 48 * 10 * 3
    record = manifest["record"] | {
        "shapes": {"gate": [10, 48], "up": [10, 48], "down": [48, 10]},
        "bytes": width * 4,
    }
    edit_manifest(ours, U=2, record=record)
    with pytest.raises(CheckpointError, match="U is 2, but the manifest has no"):
        open_checkpoint(ours)
    edit_manifest(ours, refactor={"gate": "linear", "gate_neurons": 3})
    with pytest.raises(CheckpointError, match="refactor of the manifest: gate_neurons"):
        open_checkpoint(ours)
    edit_manifest(ours, refactor={"gate": "linear"})
    reader = open_checkpoint(ours)
    assert reader.layout.expert_dim == reader.config.moe.expert_dim == 10
    assert reader.config.moe.num_experts == 2 * reader.parent_config.moe.num_experts
    assert reader.experts(0).shape == (12, width)
    with pytest.raises(ConfigError, match="sub-experts of 10 neurons cannot be exp"):
        convert_checkpoint(ours, ours.parent / "hf", to="hf", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 4}, "format_version 4, this program reads 1, 2, 3"),
        ({"format_version": True}, "format_version True, this program reads 1, 2, 3"),
        ({"format_version": "gone"}, "format_version None"),
        ({"L": "three"}, "L is 'three'"),
        ({"content_sha256": "gone"}, "manifest.json lacks content_sha256; convert"),
        ({"L": "gone", "U": "gone"}, "manifest.json lacks L, U; convert the model"),
        ({"colour": 3}, "manifest.json has unknown keys colour; known: format_version"),
        ({"L": False}, "L is False, expected a whole number"),
        ({"E": 6.0}, "E is 6.0, expected a whole number"),
        ({"hf_config": []}, r"hf_config is \[\], expected an object"),
        ({"tokenizer": 3}, "tokenizer is 3, expected a text or null"),
        ({"refactor": "linear"}, "refactor is 'linear', expected an object"),
        ({"refactor": {"gate": ["linear"]}}, "refactor of the manifest: "),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"U": 0}, "U 0"),
        ({"U": 3}, "20 neurons do not split into U=3"),
        ({"E": 7}, "E is 7, but its hf_config means 6"),
        ({"model_type": "olmoe"}, "model_type is olmoe"),
        ({"record": {"order": []}}, "record is"),
    ],
)
def test_manifest_that_lies_is_refused(ours, changes, message):
    edit_manifest(ours, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(ours)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 10_000, "\x80"])
def test_manifest_that_is_no_json_object_is_refused(ours, text):
    (ours / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="manifest.json"):
        open_checkpoint(ours)


def test_layer_file_missing_truncated_or_too_long_is_refused(ours):
    path = ours / "experts" / "layer_002.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="layer_002.bin is truncated: 69183"):
        open_checkpoint(ours)
    path.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match="layer_002.bin is too long"):
        open_checkpoint(ours)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read .*layer_002.bin"):
        open_checkpoint(ours)


def test_dense_item_missing_or_damaged_is_refused(ours):
    shutil.rmtree(ours / "dense" / "layer_001")
    with pytest.raises(CheckpointError, match="layer_001 is missing"):
        open_checkpoint(ours).dense_layer(1)
    (ours / "dense" / "layer_000" / "manifest.ocdbt").write_text("{")
    with pytest.raises(CheckpointError, match="layer_000 cannot be read"):
        open_checkpoint(ours).dense_layer(0)
    for item in ("layer_002", "head"):  # several arrays, and one
        victims = [p for p in (ours / "dense" / item).rglob("*") if p.is_file()]
        max(victims, key=lambda p: p.stat().st_size).write_bytes(b"")
    with pytest.raises(CheckpointError, match="layer_002 cannot be read"):
        open_checkpoint(ours).dense_layer(2)
    with pytest.raises(CheckpointError, match="head cannot be read"):
        open_checkpoint(ours).top()


def test_dense_arrays_of_zeros_and_of_several_chunks_come_back(ours):
    """Neither is a lost chunk taken for zeros, nor zeros for a lost chunk."""
    arrays = open_checkpoint(ours).dense_layer(1)
    arrays["attn_norm"] = np.zeros_like(arrays["attn_norm"])
    arrays["attn.q"] = arrays["attn.q"].astype(ml_dtypes.bfloat16)
    shutil.rmtree(ours / "dense" / "layer_001")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_CHUNK_BYTES", 1024)
        dense.DenseWriter(ours).save(1, arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    found = dense.read_item(ours, 1, shapes)
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in arrays.items()
    }
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_lost_chunk_of_dense_weights_is_refused(ours):
    """Without CRCs, too: TensorStore would read zeros."""
    shapes = {name: a.shape for name, a in open_checkpoint(ours).dense_layer(1).items()}
    base = {"driver": "file", "path": f"{ours}/dense/layer_001/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (chunk,) = [key for key in store.list().result() if key.startswith(b"attn.q/c/")]
    store.delete_range(tensorstore.KvStore.KeyRange(chunk, chunk + b"\0")).result()
    with pytest.raises(CheckpointError, match="layer_001 cannot be read .*attn.q"):
        dense.read_item(ours, 1, shapes)


def test_dense_weights_are_read_without_jax(converted):
    """A backend that has started forbids `jax.distributed`; Orbax's restore waits."""
    text = (
        "import sys; from moe_edge.convert.open import open_checkpoint; "
        f"reader = open_checkpoint({str(converted)!r}); reader.top(); "
        "reader.dense_layer(0); reader.dense_dtypes(1); "
        "print([name for name in ('jax', 'orbax') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_dense_tensors_missing_extra_and_misshapen_are_named(ours):
    arrays = open_checkpoint(ours).dense_layer(1)
    del arrays["attn.v_bias"]
    arrays["attn.q"] = arrays["attn.q"][1:]
    arrays["attn.sinks"] = np.ones(4, np.float32)
    shutil.rmtree(ours / "dense" / "layer_001")
    dense.DenseWriter(ours).save(1, arrays)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(ours).dense_layer(1)
    text = str(error.value)
    assert "missing attn.v_bias" in text and "unexpected attn.sinks" in text
    assert "attn.q has shape (47, 48), expected (48, 48)" in text


def test_tokenizer_outside_the_folder_is_refused(ours):
    edit_manifest(ours, tokenizer="../../secret.json")
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        open_checkpoint(ours).tokenizer_path  # noqa: B018
