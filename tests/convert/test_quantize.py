"""Dequantising block FP8 and MXFP4, and refusing what is neither."""

import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.quant_scaled import scale_values
from moe_edge.convert.quantize import quantization
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.conversion import load_all
from tests.support.quantised import FP8, fp8_folder
from tests.support.tiny_checkpoints import (
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP4_BY_CODE = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def mxfp4_folder(path):
    """gpt-oss with packed experts; returns the wanted float32 values."""
    raw = raw_config("gpt_oss", torch_dtype="bfloat16", quantization_config=MXFP4)
    rng = np.random.default_rng(2)
    stored, wanted = {}, {}
    for name, array in random_tensors(raw, "bfloat16").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = wanted[name] = array
            continue
        E, width, rows = array.shape
        blocks = rng.integers(0, 256, (E, rows, width // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 131, (E, rows, width // 32), dtype=np.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        values = np.empty((E, rows, width), np.float32)
        for index in np.ndindex(blocks.shape):
            e, row, group, byte = index
            power = 2.0 ** (int(scales[e, row, group]) - 127)
            at = group * 32 + byte * 2
            values[e, row, at] = FP4_BY_CODE[blocks[index] & 15] * power
            values[e, row, at + 1] = FP4_BY_CODE[blocks[index] >> 4] * power
        wanted[name] = values.transpose(0, 2, 1)
    return write_folder(path, raw, stored), wanted


@pytest.mark.parametrize("make", [fp8_folder, mxfp4_folder])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_quantised_folder_converts_to_its_values(make, dtype, tmp_path):
    hf, wanted = make(tmp_path / "hf")
    convert_checkpoint(hf, tmp_path / "ours", dtype=dtype, progress=False)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", to="hf", progress=False)
    kind = np.dtype(dtype or ml_dtypes.bfloat16)
    back = open_checkpoint(tmp_path / "back")
    assert "quantization_config" not in back.config.hf_config
    assert back.config.hf_config["torch_dtype"] == kind.name
    for name, array in wanted.items():
        got = back.source.read(name)
        keep = name.endswith("e_score_correction_bias")
        expected = array if keep else array.astype(kind)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_quantised_folder_hashes_like_its_conversion(tmp_path):
    hf, _ = mxfp4_folder(tmp_path / "hf")
    result = convert_checkpoint(hf, tmp_path / "ours", progress=False)
    assert open_checkpoint(hf).content_sha256() == result["content_sha256"]


def test_fp8_scale_bytes_are_powers_of_two():
    got = scale_values(np.array([126, 127, 130], np.uint8))
    assert got.tolist() == [0.5, 1.0, 8.0]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bnb", "bits": 4}, 'quant_method "bnb"; known: fp8, comp'),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({**FP8, "rotation": "hadamard"}, "hadamard"),
        ("fp8", "quant_method null"),
    ],
)
def test_quantization_rejects_what_is_not_implemented(section, message):
    with pytest.raises(ConfigError, match=message):
        quantization({"quantization_config": section})


def test_fp8_rejects_missing_and_misshapen_scales(tmp_path):
    raw = raw_config("deepseek_v3", quantization_config=FP8)
    tensors = random_tensors(raw, "bfloat16")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    write_folder(tmp_path / "a", raw, tensors)
    lacks = f"FP8 tensor {name} lacks its {name}_scale_inv or {name}_scale"
    with pytest.raises(CheckpointError, match=lacks):
        open_checkpoint(tmp_path / "a")
    tensors[name + "_scale_inv"] = np.ones((3, 3), np.float32)
    write_folder(tmp_path / "b", raw, tensors)
    wrong = (
        rf"{name} has FP8 scales of shape \(3, 3\) for a weight \(48, 32\), expected"
    )
    with pytest.raises(CheckpointError, match=rf"{wrong} \(3, 2\);"):
        open_checkpoint(tmp_path / "b")
    tensors[name + "_scale_inv"] = np.ones((3, 2), np.int32)
    write_folder(tmp_path / "c", raw, tensors)
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv is int32, expected"):
        open_checkpoint(tmp_path / "c")
    tensors |= {
        name + end: np.ones((3, 2), np.float32) for end in ("_scale", "_scale_inv")
    }
    write_folder(tmp_path / "d", raw, tensors)
    with pytest.raises(
        CheckpointError, match=f"{name} has {name}_scale_inv and .*, exp"
    ):
        open_checkpoint(tmp_path / "d")


def test_fp8_without_its_config_is_refused(tmp_path):
    hf, _ = fp8_folder(tmp_path / "hf")
    raw = raw_config("deepseek_v3", torch_dtype="bfloat16")
    (hf / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="unexpected .*_scale_inv"):
        open_checkpoint(hf)


def test_mxfp4_rejects_missing_and_misshapen_scales(tmp_path):
    hf, _ = mxfp4_folder(tmp_path / "hf")
    raw = open_checkpoint(hf).config.hf_config
    arrays = load_all(hf)
    name = "model.layers.1.mlp.experts.down_proj"
    short = arrays | {name + "_scales": arrays[name + "_scales"][:, 1:]}
    write_folder(tmp_path / "a", raw, short)
    with pytest.raises(CheckpointError, match=f"{name} has MXFP4 scales"):
        open_checkpoint(tmp_path / "a")
    more = arrays | {"model.layers.1.mlp.experts.input_scale": np.ones((), np.float32)}
    write_folder(tmp_path / "b", raw, more)
    with pytest.raises(CheckpointError, match="experts.input_scale"):
        open_checkpoint(tmp_path / "b")
    del arrays[name + "_scales"]
    write_folder(tmp_path / "c", raw, arrays)
    with pytest.raises(CheckpointError, match=f"needs exactly {name}_scales"):
        open_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    "family, section", [("deepseek_v3", FP8), ("olmoe", FP8), ("gpt_oss", MXFP4)]
)
def test_quantisation_that_no_tensor_has_is_refused(family, section, tmp_path):
    hf = hf_folder(tmp_path / "hf", family, quantization_config=section)
    method = section["quant_method"]
    message = f"quantization_config of {method}, but no tensor is {method} with its sc"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(hf, tmp_path / "ours", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
