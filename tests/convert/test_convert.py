"""Conversion both ways on tiny random folders of every family."""

import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.slow_cases import slow_but
from tests.support.tiny_checkpoints import (
    FAMILIES,
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)

ODD_BYTES = b'{"model":  {"type": "WordLevel", "vocab":{"a" :0}, "unk_token": "a"}}\n'


@pytest.mark.parametrize(
    "family", slow_but(["qwen2_moe", "deepseek_v3", "gpt_oss"], FAMILIES)
)
def test_round_trip_every_family_bit_exact(family, tmp_path):
    raw = raw_config(family)
    tensors = random_tensors(raw)
    hf = write_folder(tmp_path / "hf", raw, tensors, shard_bytes=60_000)
    (hf / "tokenizer.json").write_bytes(ODD_BYTES)
    (hf / "generation_config.json").write_text('{"eos_token_id":[7 ,8]}')
    first = convert(hf, tmp_path / "ours")
    again = convert(tmp_path / "ours", tmp_path / "back", to="hf", shard_size="50KB")
    assert_same_tensors(load_all(tmp_path / "back"), tensors)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()
    hashes = {first["content_sha256"], again["content_sha256"]}
    hashes |= {open_checkpoint(tmp_path / n).content_sha256() for n in ("hf", "back")}
    assert len(hashes) == 1
    assert first["bytes"] == sum(array.nbytes for array in tensors.values())


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_readers_of_both_formats_agree(family, tmp_path):
    hf = hf_folder(tmp_path / "hf", family)
    convert(hf, tmp_path / "ours")
    theirs, ours = open_checkpoint(hf), open_checkpoint(tmp_path / "ours")
    assert ours.config == theirs.config and ours.layout == theirs.layout
    assert ours.hf_source == str(hf) and ours.dtype == theirs.dtype
    pairs = [(ours.top(), theirs.top())]
    for layer in range(ours.config.num_layers):
        pairs.append((ours.dense_layer(layer), theirs.dense_layer(layer)))
    for got, expected in pairs:
        assert_same_tensors(got, expected)
    for layer in ours.config.moe_layers:
        np.testing.assert_array_equal(ours.experts(layer), theirs.experts(layer))


def test_records_hold_gpt_oss_experts_out_by_in(tmp_path):
    reader = open_checkpoint(hf_folder(tmp_path / "hf", "gpt_oss"))
    tensors = load_all(tmp_path / "hf")
    fused = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    record = reader.experts(1)[4]
    part = reader.layout.part
    np.testing.assert_array_equal(part(record, "gate"), fused[4, :, 0::2].T)
    np.testing.assert_array_equal(part(record, "up"), fused[4, :, 1::2].T)
    down = tensors["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(part(record, "down"), down[4].T)
    bias = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(part(record, "up_bias"), bias[4, 1::2])


def test_chunks_of_experts_do_not_change_the_result(tmp_path, monkeypatch):
    hf = hf_folder(tmp_path / "hf", "gpt_oss")
    whole = convert(hf, tmp_path / "whole")
    monkeypatch.setattr("moe_edge.convert.content_hash.CHUNK_BYTES", 1)
    parts = convert(hf, tmp_path / "parts")
    assert parts["content_sha256"] == whole["content_sha256"]
    for path in (tmp_path / "whole" / "experts").iterdir():
        other = tmp_path / "parts" / "experts" / path.name
        assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_casts_all_but_the_correction_bias(dtype, tmp_path):
    hf = hf_folder(tmp_path / "hf", "deepseek_v3")
    convert(hf, tmp_path / "ours", dtype=dtype)
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    source, back = load_all(hf), load_all(tmp_path / "back")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    for name, array in source.items():
        keep = name.endswith("e_score_correction_bias")
        expected = array if keep else array.astype(kind)
        assert back[name].dtype == expected.dtype
        assert back[name].tobytes() == expected.tobytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["torch_dtype"] == dtype


def test_bfloat16_survives_a_detour_through_float32(tmp_path):
    raw = raw_config("olmoe", torch_dtype="bfloat16")
    hf = write_folder(tmp_path / "hf", raw)
    convert(hf, tmp_path / "wide", dtype="float32")
    convert(tmp_path / "wide", tmp_path / "back", to="hf", dtype="bfloat16")
    assert_same_tensors(load_all(tmp_path / "back"), load_all(hf))


def test_unused_tensors_are_dropped_by_name(tmp_path):
    raw = raw_config("deepseek_v3")
    tensors = random_tensors(raw)
    extra = {
        "model.layers.3.eh_proj.weight": np.ones((2, 3), np.float32),
        "model.layers.3.mlp.experts.0.up_proj.weight": np.ones((2, 2), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": 10_000.0
        ** -np.array([0, 2 / 6, 4 / 6], np.float32),
    }
    hf = write_folder(tmp_path / "hf", raw, tensors | extra)
    result = convert(hf, tmp_path / "ours")
    assert sorted(result["dropped"]) == sorted(extra)
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert sorted(manifest["source"]["dropped"]) == sorted(extra)
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_tensors(load_all(tmp_path / "back"), tensors)


def test_dry_run_writes_nothing(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    result = convert(hf, tmp_path / "ours", dry_run=True)
    assert result == {"dry_run": True, "model_type": "olmoe", "dropped": []}
    assert not (tmp_path / "ours").exists()


def test_config_text_is_stored_and_accepted_by_readers(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    for source, name, to in ((hf, "ours", "ours"), (tmp_path / "ours", "back", "hf")):
        convert(source, tmp_path / name, to=to, config_text=lambda: "a.b = 1\n")
        assert (tmp_path / name / "config.gin").read_text() == "a.b = 1\n"
        assert open_checkpoint(tmp_path / name).config.model_type == "olmoe"
