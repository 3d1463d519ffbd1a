"""`convert --check`: what is said of a checkpoint without its weights."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from moe_edge.checkpoint.dtypes import BFLOAT16
from moe_edge.convert import safetensors_reader
from moe_edge.convert.check import DoesNotLoad, check_checkpoint, lines, sizes, summary
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from tests.support.conversion import convert
from tests.support.packed_weights import FORMATS, packed_folder
from tests.support.tiny_checkpoints import (
    FAMILIES,
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Fails where the check reads a tensor."""

    def tensor(self, name):
        raise AssertionError(f"read {name}")

    def allow():
        monkeypatch.undo()

    monkeypatch.setattr(safetensors_reader.SafetensorsFile, "tensor", tensor)
    return allow


def shown(check) -> str:
    return "\n".join(lines(check))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_by_its_headers_and_has_its_converted_sizes(
    family, tmp_path, no_weights
):
    hf = hf_folder(tmp_path / "hf", family)
    check = check_checkpoint(hf)
    said = summary(check)
    assert said["loads"] and said["checked"] == "names and shapes"
    assert said["model_type"] == family and said["dropped"] == []
    no_weights()
    reader, config = open_checkpoint(hf), check.config
    assert config == reader.config
    size = sizes(config)
    one = reader.layout.num_bytes(np.float32)
    assert size["expert"]["float32"] == one == 2 * size["expert"]["bfloat16"]
    count = len(config.moe_layers) * config.moe.num_experts
    assert size["experts"]["float32"] == count * one
    # Everything else in the folder, also what is kept for export alone.
    stored = [a for f in hf.glob("*.safetensors") for a in load_file(f).values()]
    rest = sum(array.nbytes for array in stored) - count * one
    assert size["dense"]["float32"] == rest
    fits = config.d_model % 32 == config.moe.expert_dim % 32 == 0
    assert (size["expert"]["q4_0"] is not None) == fits


def test_sizes_are_those_of_the_files_that_convert_writes(tmp_path, no_weights):
    hf = packed_folder(tmp_path / "hf", FORMATS["fp8 static"])[0]
    said = summary(check_checkpoint(hf))
    no_weights()
    for kind in ("q4_0", None):
        path = tmp_path / str(kind)
        done = convert(hf, path, expert_dtype=kind)
        name = kind or "bfloat16"
        expected = said["experts_bytes"][name] + said["dense_bytes"]["bfloat16"]
        assert done["bytes"] == expected
    done = convert(hf, tmp_path / "all", dtype="q8_0")
    expected = said["experts_bytes"]["q8_0"] + said["dense_bytes"]["q8_0"]
    assert done["bytes"] == expected
    reread = summary(check_checkpoint(path))
    assert reread["loads"] and reread["experts_bytes"] == said["experts_bytes"]


@pytest.mark.parametrize("name", FORMATS)
def test_packed_folder_is_checked_by_headers_and_by_names(name, tmp_path):
    hf, _, stored, _ = packed_folder(tmp_path / "hf", FORMATS[name])
    whole = summary(check_checkpoint(hf))
    (hf / "model.safetensors").rename(tmp_path / "gone")
    index = {"weight_map": dict.fromkeys(stored, "model-1.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    named = summary(check_checkpoint(hf))
    assert whole["loads"] and named["loads"], named["reasons"]
    assert whole["quantized"] == FORMATS[name].section["quant_method"]
    assert named["checked"] == "names" and named["absent_tensors"] == len(stored)
    assert named["tensors"] == whole["tensors"]
    dropped = [n for group in whole["dropped"] for n in group["names"]]
    assert all(n.endswith("input_scale") for n in dropped)
    assert bool(dropped) == ("static" in name)


def test_config_alone_gives_sizes_and_says_that_tensors_were_not_checked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config("mixtral")))
    check = check_checkpoint(tmp_path)
    said = summary(check)
    assert said["loads"] and said["checked"] == "nothing" and said["tensors"] is None
    assert said["expert_bytes"]["float32"] == 4 * 3 * 48 * 20
    text = shown(check)
    assert "tensors: not checked\nno tokenizer.json: pro" in text
    assert "alone\nloads, as far as it was checked" in text
    assert "float32        11.5 kB        207 kB" in text
    assert "\ntokens of a context: 160\n" in text
    # Where it ends before what config.json says, why.
    raw = raw_config("deepseek_v32", index_topk=70)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check = check_checkpoint(tmp_path)
    assert "\ntokens of a context: 70 (beyond index_topk=70 its spar" in shown(check)
    said = summary(check)
    assert said["max_positions"] == 70 and "index_topk" in said["positions_end"]
    assert "q8_0                 -             -           -" in text
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (reason,) = check_checkpoint(tmp_path).reasons
    assert "has no .safetensors file (other weight formats" in reason


def test_every_reason_is_named_at_once(tmp_path):
    raw = raw_config("olmoe", rotary_trick=3, quantization_config={"quant_method": "x"})
    hf = write_folder(tmp_path / "hf", raw, {"a": np.ones(3, np.float32)})
    check = check_checkpoint(hf)
    assert len(check.reasons) == 2 and check.config is None
    assert "not implemented: rotary_trick=3" in check.reasons[0]
    assert 'quant_method "x"; known: fp8' in check.reasons[1]
    assert "does not load: config.json of olmoe has fields" in shown(check)
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    tensors[GATE] = tensors[GATE].T.copy()
    tensors["model.layers.0.bonus"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    tensors["mtp.fc.weight"] = np.ones(3, np.float32)
    said = summary(check_checkpoint(write_folder(tmp_path / "b", raw, tensors)))
    assert not said["loads"] and len(said["reasons"]) == 2
    assert said["missing"] == {"tensors": 1, "names": ["model.norm.weight"]}
    assert said["unexpected"] == {"tensors": 1, "names": ["model.layers.0.bonus"]}
    (wrong,) = said["wrong"]["names"]
    assert wrong == f"{GATE} has shape (48, 20), expected (20, 48)"
    assert "lm_head.weight (int32): expected one of float32" in said["reasons"][1]
    (dropped,) = said["dropped"]
    assert dropped["names"] == ["mtp.fc.weight"] and "later tokens" in dropped["why"]


def test_experts_of_several_dtypes_need_a_dtype(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    tensors[GATE] = tensors[GATE].astype(BFLOAT16)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    (reason,) = check_checkpoint(hf).reasons
    assert "several dtypes" in reason and "convert with --dtype" in reason
    assert check_checkpoint(hf, BFLOAT16).reasons == []
    message = "hf does not load: experts with 48 width cannot be q4_0, whose"
    with pytest.raises(DoesNotLoad, match=message) as error:
        convert(hf, None, check=True, dtype="bfloat16", expert_dtype="q4_0")
    assert error.value.summary["expert_bytes"]["q4_0"] is None


def test_head_of_a_tied_model_is_not_compared(tmp_path):
    raw = raw_config("qwen2_moe")
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    check = check_checkpoint(write_folder(tmp_path / "hf", raw, tensors))
    why = "tied to the embedding, unless its values differ from that"
    assert check.unused == {"lm_head.weight": why} and not check.reasons


def test_shards_that_are_there_are_checked_and_may_be_torn(tmp_path):
    raw = raw_config("mixtral")
    hf = write_folder(tmp_path / "hf", raw, shard_bytes=60_000)
    first, *_, last = sorted(hf.glob("*.safetensors"))
    first.unlink()
    said = summary(check_checkpoint(hf))
    assert said["loads"] and said["checked"] == "names"
    assert 0 < said["absent_tensors"] < said["tensors"]
    last.write_bytes(last.read_bytes()[:-1])
    (reason,) = check_checkpoint(hf).reasons
    assert f"{last} is damaged or truncated" in reason
    last.unlink()
    index = hf / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    gone = next(name for name, file in names.items() if file == first.name)
    del names[gone]
    names["model.layers.1.b"] = first.name
    index.write_text(json.dumps({"weight_map": names}))
    (reason,) = check_checkpoint(hf).reasons
    assert f"missing {gone}; unexpected model.layers.1.b;" in reason


def test_config_that_is_no_object_is_a_reason(tmp_path):
    for text, message in (("[1]", "must hold an object"), ("{", "is not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        (reason,) = check_checkpoint(tmp_path).reasons
        assert message in reason


def test_check_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        check_checkpoint("nowhere")
    with pytest.raises(ConfigError, match="--check writes nothing, got --dst x; leave"):
        convert(tmp_path, "x", check=True)
    with pytest.raises(ConfigError, match="--verify reads all weights, --check none"):
        convert(tmp_path, None, check=True, verify=True)
    with pytest.raises(ConfigError, match="no src given"):
        convert(None, None, check=True)
