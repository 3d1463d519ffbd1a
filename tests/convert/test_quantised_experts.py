"""Converting to quantised experts, and back."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.checksums import crc32
from moe_edge.checkpoint.manifest import with_kind
from moe_edge.convert.convert import verify_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.quantised import BLOCK_BYTES, IN_EIGHTS, KINDS, decode
from moe_edge.model.quantising import encode
from tests.convert.test_quantize import mxfp4_folder
from tests.support.block_formats import whole_blocks_folder
from tests.support.conversion import convert, load_all
from tests.support.refactored import write_random
from tests.support.tiny_checkpoints import (
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)

SIZES = {"hidden_size": 96, "moe_intermediate_size": 32}  # qwen2_moe's, whole blocks
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


@pytest.fixture(scope="module", params=KINDS)
def converted(request, tmp_path_factory):
    """(kind, HF folder, its conversion, what converting said)."""
    folder, kind = tmp_path_factory.mktemp("quantised"), request.param
    hf = hf_folder(folder / "hf", "qwen2_moe", torch_dtype="bfloat16", **SIZES)
    said = convert(hf, folder / "q", expert_dtype=kind)
    return kind, hf, folder / "q", said


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def test_records_hold_the_encoded_weights(converted):
    kind, hf, path, said = converted
    reader, tensors = open_checkpoint(path), load_all(hf)
    assert reader.layout.kind == IN_EIGHTS[kind] and reader.dtype == np.uint8
    assert reader.config == with_kind(open_checkpoint(hf).config, IN_EIGHTS[kind])
    records = reader.experts(2)
    for name in ("gate", "up", "down"):
        stored = tensors[EXPERT.format(2, 4, name)].astype(np.float32)
        want = decode(kind, encode(kind, stored))
        np.testing.assert_array_equal(reader.layout.part(records[4], name), want)
    some = np.empty((2, reader.layout.size), np.uint8)
    reader.read_experts(2, 3, some)
    np.testing.assert_array_equal(some, records[3:5])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["dtype"] == IN_EIGHTS[kind]
    per_expert = -(-3 * 96 * 32 // 32 * BLOCK_BYTES[kind] // 64) * 64
    assert manifest["record"]["bytes"] == per_expert == reader.layout.size
    assert (path / "experts/layer_002.bin").stat().st_size == 6 * per_expert + 64
    assert reader.checksums.experts[2] == [crc32(record) for record in records]
    dense = sum(t.nbytes for name, t in tensors.items() if not is_expert(name))
    assert said["bytes"] == dense + 2 * 6 * per_expert
    assert said["expert_dtype"] == kind and "dequantised" not in said


def test_dense_weights_stay_as_they_are(converted):
    _, hf, path, _ = converted
    ours, theirs = open_checkpoint(path), open_checkpoint(hf)
    for name, array in theirs.dense_layer(2).items():
        found = ours.dense_layer(2)[name]
        assert found.dtype == ml_dtypes.bfloat16 and found.tobytes() == array.tobytes()


def test_export_is_what_the_blocks_mean_and_says_so(converted, tmp_path):
    kind, hf, path, said = converted
    back = convert(path, tmp_path / "back", to="hf")
    assert back["dequantised"] == kind and "expert_dtype" not in back
    assert back["content_sha256"] == said["content_sha256"]
    assert verify_checkpoint(path) == said["content_sha256"]
    assert open_checkpoint(tmp_path / "back").content_sha256() == verify_checkpoint(
        path
    )
    source, found = load_all(hf), load_all(tmp_path / "back")
    assert sorted(source) == sorted(found)
    for name, array in source.items():
        want = array
        if is_expert(name):
            want = decode(kind, encode(kind, array.astype(np.float32)))
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(
            found[name].astype(np.float32), want.astype(np.float32)
        )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    # What it means can be quantised again without loss.
    again = convert(tmp_path / "back", tmp_path / "again", expert_dtype=kind)
    assert again["content_sha256"] == said["content_sha256"]


def test_export_in_another_dtype_rounds_once(converted, tmp_path):
    kind, hf, path, _ = converted
    convert(path, tmp_path / "back", to="hf", dtype="bfloat16")
    name = EXPERT.format(0, 1, "down")
    stored = load_all(hf)[name].astype(np.float32)
    want = decode(kind, encode(kind, stored)).astype(ml_dtypes.bfloat16)
    assert load_all(tmp_path / "back")[name].tobytes() == want.tobytes()


def test_biases_stay_float32(tmp_path):
    hf = hf_folder(tmp_path / "hf", "gpt_oss", torch_dtype="bfloat16")
    said = convert(hf, tmp_path / "q", expert_dtype="q4_0")
    reader, plain = open_checkpoint(tmp_path / "q"), open_checkpoint(hf)
    for name in ("gate_bias", "up_bias", "down_bias"):
        found = reader.layout.part(reader.experts(1), name)
        want = plain.layout.part(plain.experts(1), name).astype(np.float32)
        assert found.dtype == np.float32 and found.tobytes() == want.tobytes()
    back = convert(tmp_path / "q", tmp_path / "back", to="hf")
    assert back["content_sha256"] == said["content_sha256"]


def test_ours_is_quantised_as_its_source_is(converted, tmp_path):
    kind, hf, _, said = converted
    convert(hf, tmp_path / "ours")
    again = convert(tmp_path / "ours", tmp_path / "q", expert_dtype=kind)
    assert again["content_sha256"] == said["content_sha256"]


def test_mxfp4_of_a_checkpoint_in_it_loses_nothing(tmp_path):
    hf, _ = mxfp4_folder(tmp_path / "hf")
    convert(hf, tmp_path / "wide")
    convert(hf, tmp_path / "q", expert_dtype="mxfp4")
    wide, narrow = (open_checkpoint(tmp_path / name) for name in ("wide", "q"))
    assert narrow.layout.kind == "mxfp4x8" and wide.dtype == ml_dtypes.bfloat16
    for layer in wide.config.moe_layers:
        floats, blocks = wide.experts(layer), narrow.experts(layer)
        assert blocks.nbytes < 0.31 * floats.nbytes
        for part in wide.layout.shapes:
            want = wide.layout.part(floats, part).astype(np.float32)
            found = narrow.layout.part(blocks, part)
            assert found.tobytes() == want.tobytes()


def test_sizes_that_no_blocks_fill_are_refused(tmp_path):
    hf = hf_folder(tmp_path / "hf", "qwen2_moe", hidden_size=64)
    with pytest.raises(ConfigError, match="with 20 neurons cannot be q8_0"):
        convert(hf, tmp_path / "q", expert_dtype="q8_0")
    hf = hf_folder(tmp_path / "hf2", "qwen2_moe")
    with pytest.raises(ConfigError, match="with 48 width cannot be q4_0"):
        convert(hf, tmp_path / "q", expert_dtype="q4_0", dry_run=True)
    assert not (tmp_path / "q").exists()


def test_sub_experts_are_quantised_where_they_are_whole_blocks(tmp_path):
    hf = whole_blocks_folder(tmp_path / "hf")
    parent = write_random(hf, tmp_path / "two", subs=2)
    convert(parent, tmp_path / "q", expert_dtype="q8_0")
    plain, reader = open_checkpoint(parent), open_checkpoint(tmp_path / "q")
    assert reader.config == with_kind(plain.config, "q8_0x8")
    assert reader.config.moe.sub_experts == 2 and reader.layout.expert_dim == 32
    assert reader.manifest["refactor"] == plain.manifest["refactor"]
    want = plain.layout.part(plain.experts(2)[11], "up")
    found = reader.layout.part(reader.experts(2)[11], "up")
    np.testing.assert_array_equal(found, decode("q8_0", encode("q8_0", want)))
    back = convert(tmp_path / "q", tmp_path / "back", to="hf")
    assert back["dequantised"] == "q8_0"
    assert open_checkpoint(tmp_path / "back").config.moe.num_experts == 12
    four = write_random(hf, tmp_path / "four", subs=4)
    with pytest.raises(ConfigError, match="with 16 neurons cannot be q8_0"):
        convert(four, tmp_path / "x", expert_dtype="q8_0")
    with pytest.raises(CheckpointError, match="two is refactored and in our format"):
        convert(parent, tmp_path / "x")


def test_what_makes_no_sense_is_refused(converted, tmp_path):
    kind, hf, path, _ = converted
    with pytest.raises(ConfigError, match="expert dtype.*q5_0"):
        convert(hf, tmp_path / "x", expert_dtype="q5_0")
    with pytest.raises(ConfigError, match="--expert_dtype q8_0 is of our format"):
        convert(hf, tmp_path / "x", expert_dtype="q8_0", to="hf")
    for options in ({"expert_dtype": "q8_0"}, {"dtype": "bfloat16"}, {}):
        with pytest.raises(CheckpointError, match=f"q has {kind} weights and is"):
            convert(path, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e8])
def test_weights_that_a_kind_cannot_hold_are_refused(value, tmp_path):
    raw = raw_config("qwen2_moe", **SIZES)
    tensors = random_tensors(raw)
    tensors[EXPERT.format(2, 3, "up")][7, 9] = value
    hf = write_folder(tmp_path / "hf", raw, tensors)
    what = "layers.2.mlp.experts.3.up_proj" if value == 1e8 else "layer 2, expert 3 has"
    with pytest.raises(CheckpointError, match=what):
        convert(hf, tmp_path / "q", expert_dtype="q8_0")
    assert not (tmp_path / "q").exists()


def test_a_manifest_of_other_sizes_is_refused(converted, tmp_path):
    _, _, path, _ = converted
    manifest = json.loads((path / "manifest.json").read_text())
    other = tmp_path / "q"
    for name in ("experts", "dense", "hf"):
        (other / name).mkdir(parents=True)
    for changed, match in (
        ({"dtype": "q5_0"}, "dtype 'q5_0'"),
        ({"dtype": "float32"}, "record is"),
        ({"record": manifest["record"] | {"bytes": 64}}, "record is"),
    ):
        (other / "manifest.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(other)


def test_a_short_file_of_records_is_refused(converted, tmp_path):
    kind, hf, _, _ = converted
    convert(hf, tmp_path / "q", expert_dtype=kind)
    path = tmp_path / "q" / "experts/layer_002.bin"
    path.write_bytes(path.read_bytes()[:-1])
    size = open_checkpoint(hf).layout.unquantised
    bytes_each = dataclasses.replace(size, kind=kind).size
    with pytest.raises(CheckpointError, match=f"6 records of {bytes_each} bytes"):
        open_checkpoint(tmp_path / "q")
