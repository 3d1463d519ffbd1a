"""Folders that name or stack their tensors as transformers 5 does."""

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert.families import FAMILIES as FAMILIES_OF_CODE
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.safetensors_reader import open_folder
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.quantised import FP8, fp8_folder
from tests.support.tiny_checkpoints import (
    FAMILIES,
    random_tensors,
    raw_config,
    write_folder,
)

STACKED = [family for family in FAMILIES if not FAMILIES_OF_CODE[family].fused]


def stacked(tensors: dict, gate="gate_proj", up="up_proj", down="down_proj") -> dict:
    """The same tensors with one tensor a layer for all experts, as transformers 5's."""
    found, experts = {}, {}
    for name, array in tensors.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            found[name] = array
            continue
        number, part, suffix = rest.split(".", 2)
        suffix = suffix.removeprefix("weight")
        experts.setdefault((prefix, suffix), {})[int(number), part] = array
    for (prefix, suffix), parts in experts.items():
        ids = range(1 + max(number for number, _ in parts))
        pairs = [np.concatenate([parts[i, gate], parts[i, up]]) for i in ids]
        found[f"{prefix}.experts.gate_up_proj{suffix}"] = np.stack(pairs)
        found[f"{prefix}.experts.down_proj{suffix}"] = np.stack(
            [parts[i, down] for i in ids]
        )
    return found


def of_transformers_5(family: str, tensors: dict) -> dict:
    own = FAMILIES_OF_CODE[family]
    for theirs, published in own.renamed.items():
        tensors = {n.replace(published, theirs): a for n, a in tensors.items()}
    names = (name.removesuffix(".weight") for name in own.expert_tensors.values())
    return stacked(tensors, *names)


@pytest.mark.parametrize("family", STACKED)
def test_stacked_experts_are_read_as_single_ones(family, tmp_path):
    raw = raw_config(family)
    tensors = random_tensors(raw)
    plain = write_folder(tmp_path / "plain", raw, tensors)
    new = of_transformers_5(family, tensors)
    assert len(new) < len(tensors)
    hf = write_folder(tmp_path / "stacked", raw, new)
    ours, theirs = open_checkpoint(hf), open_checkpoint(plain)
    for layer in ours.config.moe_layers:
        np.testing.assert_array_equal(ours.experts(layer), theirs.experts(layer))
    assert ours.content_sha256() == theirs.content_sha256()


def test_stacked_experts_come_back_as_published(tmp_path):
    raw = raw_config("mixtral")
    tensors = random_tensors(raw)
    write_folder(tmp_path / "hf", raw, of_transformers_5("mixtral", tensors))
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_tensors(load_all(tmp_path / "back"), tensors)


def test_layout_is_the_familys_where_shapes_cannot_tell(tmp_path):
    """2F = D: [E, 2F, D] and gpt-oss's [E, D, 2F] look the same."""
    raw = raw_config("olmoe", intermediate_size=24)
    new = stacked(random_tensors(raw))
    fused = new["model.layers.1.mlp.experts.gate_up_proj"]
    assert fused.shape == (6, 48, 48)
    reader = open_checkpoint(write_folder(tmp_path / "hf", raw, new))
    record, part = reader.experts(1)[4], reader.layout.part
    np.testing.assert_array_equal(part(record, "gate"), fused[4, :24])
    np.testing.assert_array_equal(part(record, "up"), fused[4, 24:])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_model_in_front_are_read(family, tmp_path):
    raw = raw_config(family)
    tensors = random_tensors(raw)
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    plain = write_folder(tmp_path / "plain", raw, tensors)
    hf = write_folder(tmp_path / "bare", raw, bare)
    digests = {open_checkpoint(path).content_sha256() for path in (hf, plain)}
    assert len(digests) == 1


def test_unused_tensors_without_model_in_front_are_left_out(tmp_path):
    raw = raw_config("deepseek_v3")
    extra = {"layers.3.eh_proj.weight": np.ones((2, 3), np.float32)}
    hf = write_folder(tmp_path / "hf", raw, random_tensors(raw) | extra)
    assert open_checkpoint(hf).dropped == list(extra)


def test_tensor_under_two_names_is_refused(tmp_path):
    raw = raw_config("olmoe")
    twice = {"norm.weight": np.ones(48, np.float32)}
    hf = write_folder(tmp_path / "hf", raw, random_tensors(raw) | twice)
    with pytest.raises(CheckpointError, match="has model.norm.weight and norm.weight"):
        open_checkpoint(hf)


def test_experts_both_single_and_stacked_are_refused(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    hf = write_folder(tmp_path / "hf", raw, tensors | stacked(tensors))
    with pytest.raises(CheckpointError, match=r"unexpected .*experts.0.gate_proj"):
        open_checkpoint(hf)


def test_stacked_experts_of_a_wrong_shape_are_refused(tmp_path):
    raw = raw_config("olmoe")
    new = stacked(random_tensors(raw))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    new[name] = np.ascontiguousarray(new[name].swapaxes(1, 2))
    hf = write_folder(tmp_path / "hf", raw, new)
    with pytest.raises(CheckpointError, match=r"shape \(6, 48, 40\), expected \(6, 40"):
        open_checkpoint(hf)


def test_stacked_fp8_experts_are_dequantised(tmp_path):
    changes = {"torch_dtype": "bfloat16", "quantization_config": FP8}
    changes["moe_intermediate_size"] = 32  # a multiple of FP8's blocks
    plain, _ = fp8_folder(tmp_path / "plain", **changes)
    raw = raw_config("deepseek_v3", **changes)
    files = open_folder(plain)
    new = stacked({name: file.tensor(name) for name, file in files.items()})
    assert new["model.layers.1.mlp.experts.down_proj"].dtype.itemsize == 1
    hf = write_folder(tmp_path / "stacked", raw, new)
    ours, theirs = open_checkpoint(hf), open_checkpoint(plain)
    assert ours.dtype == ml_dtypes.bfloat16
    for layer in ours.config.moe_layers:
        np.testing.assert_array_equal(ours.experts(layer), theirs.experts(layer))


def test_mxfp4_of_a_family_that_stores_experts_otherwise_is_refused(tmp_path):
    raw = raw_config("olmoe", quantization_config={"quant_method": "mxfp4"})
    hf = write_folder(tmp_path / "hf", raw, random_tensors(raw))
    with pytest.raises(ConfigError, match="mxfp4.*only of gpt_oss, got olmoe"):
        open_checkpoint(hf)
