"""Folders in the hub's quantised formats, against the values that they mean."""

import dataclasses
import json

import numpy as np
import pytest

from moe_edge.checkpoint.dtypes import BFLOAT16
from moe_edge.convert import packed_tensor, quant_ints
from moe_edge.convert.hf_tensors import Stored
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.quantize import quantization
from moe_edge.convert.safetensors_reader import SafetensorsFile
from moe_edge.core.checks import CheckpointError
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from tests.support.conversion import convert, load_all
from tests.support.packed_weights import FORMATS, Format, packed_folder, words
from tests.support.tiny_checkpoints import write_folder, write_tensors
from tests.support.tiny_models import score_all

FLOAT32 = np.dtype(np.float32)
PROJECTION = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("name", FORMATS)
def test_folder_holds_the_values_that_it_means(name, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_tensor, "_STRIP", 700)  # several strips a weight
    format = FORMATS[name]
    hf, plain, stored, wanted = packed_folder(tmp_path / "hf", format)
    twin = open_checkpoint(write_folder(tmp_path / "twin", plain, wanted))
    packed = open_checkpoint(hf, FLOAT32)
    assert packed.quantized == format.section["quant_method"]
    assert packed.content_sha256() == twin.content_sha256()
    assert sorted(packed.dropped) == sorted(n for n in stored if "input_scale" in n)
    as_stored = open_checkpoint(hf)
    assert as_stored.dtype.name == format.dtype
    np.testing.assert_array_equal(
        as_stored.experts(1), twin.experts(1).astype(as_stored.dtype)
    )


def test_words_hold_codes_from_their_lowest_bits():
    word = np.array([[0x76543210]], np.int32)
    assert quant_ints.unpack(word, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert quant_ints.unpack(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76]]
    assert quant_ints.unpack(-word, 4, axis=0)[0, 0] == 0
    down = quant_ints.unpack(np.array([[0x21], [0x43]], np.int32), 8, axis=0)
    assert down.tolist() == [[0x21], [0], [0], [0], [0x43], [0], [0], [0]]


def test_folder_gives_the_logits_of_its_values(tmp_path, shared_programs):
    prompts = [list(range(3, 20))]
    for name in ("fp8 blocks, packed", "int4 zeros", "awq", "gptq order"):
        at = tmp_path / name
        hf, plain, _, wanted = packed_folder(at / "hf", FORMATS[name])
        values = {n: array.astype(BFLOAT16) for n, array in wanted.items()}
        twin = write_folder(at / "twin", plain, values)
        logits = [
            score_all(ResidentEngine(load_weights(reader)), prompts)[0]
            for reader in (open_checkpoint(path, BFLOAT16) for path in (twin, hf))
        ]
        np.testing.assert_array_equal(*logits)
        assert np.isfinite(logits[0]).all() and logits[0].std() > 0.01


def test_groups_of_no_order_are_in_order(tmp_path):
    format = dataclasses.replace(FORMATS["int4 order"], pack=FORMATS["int4"].pack)
    hf, plain, stored, wanted = packed_folder(tmp_path / "hf", format)
    twin = open_checkpoint(write_folder(tmp_path / "twin", plain, wanted))
    unset = {
        name.replace("shape", "g_idx"): np.full(array[1], -1, np.int32)
        for name, array in stored.items()
        if name.endswith("weight_shape")
    }
    raw = json.loads((hf / "config.json").read_text())
    packed = open_checkpoint(write_folder(tmp_path / "b", raw, stored | unset), FLOAT32)
    assert packed.content_sha256() == twin.content_sha256()


def test_groups_apply_to_the_modules_that_they_target(tmp_path):
    """Experts in 4 bits, attention in FP8, by name, pattern and class."""
    four, eight, rows = (FORMATS[n] for n in ("int4", "int8 groups", "fp8 rows"))
    one = "model.layers.0.self_attn.q_proj"

    def pack(rng, name, shape):
        is_expert = ".experts." in name
        format = four if is_expert else eight if name == one + ".weight" else rows
        return format.pack(rng, name, shape)

    def group(format, *targets):
        (group,) = format.section["config_groups"].values()
        return group | {"targets": targets, "format": format.section["format"]}

    groups = {
        "a": group(rows, "Linear"),
        "b": group(four, r"re:.*mlp\.experts\.\d+\..*"),
        "c": group(eight, one),
    }
    section = rows.section | {"format": "mixed-precision", "config_groups": groups}
    hf, plain, _, wanted = packed_folder(tmp_path / "hf", Format(section, pack))
    twin = open_checkpoint(write_folder(tmp_path / "twin", plain, wanted))
    assert open_checkpoint(hf, FLOAT32).content_sha256() == twin.content_sha256()


def test_gptq_zero_of_0_borrows_from_its_neighbour_as_its_writers_do(tmp_path):
    """0x...50 - 0x11111111: the zero of 5 above a zero of 0 is stored as 3."""
    zeros = np.array([[0, 5, 1, 15, 2, 0, 0, 8]])
    stored = (words(zeros, 4, 1).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    tensors = {
        "m.qweight": words(np.full((16, 8), 9), 4, 0),
        "m.qzeros": stored,
        "m.scales": np.ones((1, 8), np.float16),
    }
    write_tensors(tmp_path, tensors)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    files = {name: Stored(file, name) for name in tensors}
    (weight,) = quantization({"quantization_config": FORMATS["gptq"].section}).find(
        files
    )
    assert weight.read(FLOAT32)[:, 0].tolist() == (9 - zeros[0]).tolist()


def test_gptq_bias_of_zeros_is_left_out_and_another_is_refused(tmp_path):
    hf, _, stored, _ = packed_folder(tmp_path / "hf", FORMATS["gptq"])
    raw = json.loads((hf / "config.json").read_text())
    bias = {PROJECTION + ".bias": np.zeros(64, np.float16)}
    zero = open_checkpoint(write_folder(tmp_path / "zero", raw, stored | bias))
    assert zero.dropped == list(bias)
    bias[PROJECTION + ".bias"][5] = 1
    one = write_folder(tmp_path / "one", raw, stored | bias)
    with pytest.raises(CheckpointError, match=f"unexpected {PROJECTION}.bias"):
        open_checkpoint(one)


def test_conversion_writes_the_values_and_no_quantization_config(tmp_path):
    hf, plain, _, wanted = packed_folder(tmp_path / "hf", FORMATS["awq"])
    convert(hf, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    back = load_all(tmp_path / "back")
    for name, array in wanted.items():
        np.testing.assert_array_equal(back[name], array.astype(np.float16))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == plain
    said = convert(hf, tmp_path / "q", expert_dtype="q4_0")
    assert (
        said["expert_dtype"] == "q4_0" and open_checkpoint(tmp_path / "q").layout.kind
    )
