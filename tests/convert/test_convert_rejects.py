"""Conversions that must fail: by name, and leaving nothing half-written."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from moe_edge.convert import sinks
from moe_edge.convert import work as work_module
from moe_edge.convert.open import open_checkpoint
from moe_edge.core import files
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.old_checkpoints import as_version_1
from tests.support.refactored import write_random
from tests.support.slow_cases import slow
from tests.support.tiny_checkpoints import (
    hf_folder,
    random_tensors,
    raw_config,
    write_folder,
)


def test_layers_behind_the_last_are_no_extras_elsewhere(tmp_path):
    raw = raw_config("olmoe")
    extra = {"model.layers.3.input_layernorm.weight": np.ones(48, np.float32)}
    write_folder(tmp_path / "hf", raw, random_tensors(raw) | extra)
    with pytest.raises(CheckpointError, match="unexpected model.layers.3.input_layer"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_convert_rejects_missing_and_extra_tensors_by_name(tmp_path):
    raw = raw_config("mixtral")
    tensors = random_tensors(raw)
    gone = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
    del tensors[gone]
    tensors["model.layers.0.mlp.bonus"] = np.ones(3, np.float32)
    write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "hf", tmp_path / "ours")
    assert f"missing {gone}" in str(error.value)
    assert "unexpected model.layers.0.mlp.bonus" in str(error.value)


def test_convert_many_missing_tensors_are_counted(tmp_path):
    raw = raw_config("mixtral")
    tensors = random_tensors(raw)
    kept = {name: a for name, a in tensors.items() if ".experts." not in name}
    write_folder(tmp_path / "hf", raw, kept)
    with pytest.raises(CheckpointError, match=r"\.\.\. and 46 more"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_convert_rejects_wrong_shape_with_both_shapes(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].T.copy()
    write_folder(tmp_path / "hf", raw, tensors)
    message = rf"{name} has shape \(20, 48\), expected \(48, 20\)"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(
    "name, value",
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", np.nan),
        *slow(("model.layers.1.mlp.experts.3.up_proj.weight", np.inf)),
        *slow(("model.norm.weight", -np.inf)),
    ],
)
def test_convert_rejects_nonfinite_by_name_unless_allowed(tmp_path, name, value):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    tensors[name].reshape(-1)[-1] = value
    hf = write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError, match=f"{name} has NaN or infinite"):
        convert(hf, tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    convert(hf, tmp_path / "ours", allow_nonfinite=True)
    convert(tmp_path / "ours", tmp_path / "back", to="hf", allow_nonfinite=True)
    assert_same_tensors(load_all(tmp_path / "back"), tensors)


def test_convert_rejects_overflow_of_a_cast(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    tensors["lm_head.weight"][0, 0] = 1e6
    write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError, match="lm_head.weight .*float16.*overflowed"):
        convert(tmp_path / "hf", tmp_path / "ours", dtype="float16")


@pytest.mark.parametrize("to", ["ours", "hf"])
@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot read tokenizer .*tokenizer.json: EOF while parsing"),
        ('{"version": "1.0"}', "cannot read tokenizer .*tokenizer.json: "),
        ("", "cannot read tokenizer .*tokenizer.json: EOF while parsing"),
    ],
)
def test_convert_rejects_a_broken_tokenizer(text, message, to, tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    (hf / "tokenizer.json").write_text(text)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=message):
            convert(hf, tmp_path / "out", to=to, dry_run=dry_run)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [101, -1, [5, 101], [], 1.5, True, "</s>"])
def test_convert_rejects_a_special_token_outside_the_vocabulary(name, value, tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    message = rf" of olmoe: {name} is .*, expected a token id in 0\.\.100"
    valid = {"generation_config.json": {}, "config.json": raw_config("olmoe")}
    for file, fields in valid.items():
        (hf / file).write_text(json.dumps({**fields, name: value}))
        with pytest.raises(ConfigError, match=file + message):
            convert(hf, tmp_path / "ours")
        (hf / file).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_the_generation_config_overrules_a_wrong_id_in_each_conversion(name, tmp_path):
    raw = raw_config("olmoe", intermediate_size=32)
    hf = write_folder(tmp_path / "hf", raw)
    (hf / "config.json").write_text(json.dumps(raw | {name: 500}))
    (hf / "generation_config.json").write_text(json.dumps({name: 5}))
    convert(hf, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="hf", dtype="float16")
    split = write_random(tmp_path / "ours", tmp_path / "split")
    convert(split, tmp_path / "exported", to="hf")
    for folder in ("hf", "ours", "back", "split", "exported"):
        config = open_checkpoint(tmp_path / folder).config
        assert {"eos_token_id": config.eos_ids, "bos_token_id": (config.bos_id,)}[
            name
        ] == (5,)


@pytest.mark.parametrize(
    "value, kept", [*slow((500, ())), ([5, 500], (5,)), *slow(("</s>", ()))]
)
def test_wrong_ids_in_a_checkpoint_of_ours_are_ignored_and_named(
    value, kept, tmp_path, capsys
):
    """Earlier versions converted them; `manifest.json` has them, not `config.json`."""
    hf, ours = hf_folder(tmp_path / "hf", "olmoe"), tmp_path / "ours"
    convert(hf, ours)
    manifest = json.loads((as_version_1(ours) / "manifest.json").read_text())
    manifest["hf_config"]["eos_token_id"] = value
    (ours / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert open_checkpoint(ours).config.eos_ids == kept
    line = f"{ours}/manifest.json: eos_token_id is {value!r}, expected a token id in 0."
    assert line in capsys.readouterr().err
    for to in ("ours", "hf"):
        convert(ours, tmp_path / f"to_{to}", to=to)
        assert open_checkpoint(tmp_path / f"to_{to}").config.eos_ids == kept
    assert str(tmp_path / "to_") not in capsys.readouterr().err
    generation = ours / "hf" / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": value}))
    assert open_checkpoint(ours).config.eos_ids == kept
    assert f"{generation}: eos_token_id is" in capsys.readouterr().err
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match="generation_config.json of olmoe: eos_t"):
            convert(ours, tmp_path / "copy", dry_run=dry_run)
    assert not (tmp_path / "copy").exists()


def test_end_that_a_family_fills_in_counts_only_in_its_vocabulary(tmp_path):
    hf = hf_folder(tmp_path / "olmoe", "olmoe")
    assert open_checkpoint(hf).config.eos_ids == ()
    # What transformers writes for any small model of the family.
    (hf / "generation_config.json").write_text('{"eos_token_id": 50279}')
    assert open_checkpoint(hf).config.eos_ids == ()
    hf = hf_folder(tmp_path / "mixtral", "mixtral")
    assert open_checkpoint(hf).config.eos_ids == (2,)


def test_convert_rejects_integer_weights(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    tensors["model.norm.weight"] = np.ones(48, np.int32)
    write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError, match=r"model.norm.weight \(int32\)"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_convert_rejects_experts_of_mixed_dtypes_unless_cast(tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw)
    name = "model.layers.2.mlp.experts.0.gate_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    hf = write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} \(float16\)"):
        convert(hf, tmp_path / "ours")
    convert(hf, tmp_path / "ours", dtype="float32")


def test_convert_rejects_bad_options(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    with pytest.raises(ConfigError, match="unknown target 'gguf'"):
        convert(hf, tmp_path / "x", to="gguf")
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        convert(hf, tmp_path / "x", dtype="int8")
    # Empty, as of a shell's variable that is not set: not to be taken for none.
    with pytest.raises(ConfigError, match="unknown dtype ''"):
        convert(hf, tmp_path / "x", dtype="")
    with pytest.raises(ConfigError, match="unknown expert dtype ''"):
        convert(hf, tmp_path / "x", expert_dtype="")
    with pytest.raises(ConfigError, match="size '5 apples'"):
        convert(hf, tmp_path / "x", shard_size="5 apples")
    with pytest.raises(ConfigError, match="no dst given"):
        convert(hf, None)
    with pytest.raises(ConfigError, match="workers must be 0 or more .* got -1"):
        convert(hf, tmp_path / "x", workers=-1)
    with pytest.raises(ConfigError, match="max_layers must be .* got 0"):
        convert(hf, tmp_path / "x", max_layers=0)


def test_convert_rejects_bad_output_folders(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="full is not empty"):
        convert(hf, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    with pytest.raises(OutputError, match="cannot be written"):
        convert(hf, tmp_path / "full" / "thesis.txt" / "ours")
    with pytest.raises(OutputError, match="overlaps the source"):
        convert(hf, hf / "ours")
    (tmp_path / "config.gin").write_text("")  # as if it were an earlier result
    with pytest.raises(OutputError, match="overlaps the source"):
        convert(hf, tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="no earlier result"):
        convert(hf, tmp_path / "full", overwrite=True)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_failed_overwrite_keeps_the_old_folder(tmp_path, monkeypatch):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    convert(hf, tmp_path / "out")
    monkeypatch.setattr(sinks.OursSink, "finish", lambda self, digest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(hf, tmp_path / "out", overwrite=True)
    assert open_checkpoint(tmp_path / "out").content_sha256()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_convert_notices_altered_files_of_ours(tmp_path, dtype):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    convert(hf, tmp_path / "ours")
    path = tmp_path / "ours" / "experts" / "layer_001.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="layer_001.bin: record 0 has CRC-32"):
        convert(tmp_path / "ours", tmp_path / "back", to="hf", dtype=dtype)
    with pytest.raises(CheckpointError, match="layer_001.bin: record 0 has CRC-32"):
        convert(tmp_path / "ours", None, verify=True)
    as_version_1(tmp_path / "ours")  # without checksums, the hash of all tells
    with pytest.raises(CheckpointError, match="a file was altered"):
        convert(tmp_path / "ours", tmp_path / "back", to="hf", dtype=dtype)
    with pytest.raises(CheckpointError, match="hash to .* its manifest says"):
        convert(tmp_path / "ours", None, verify=True)


@pytest.mark.parametrize(
    "change", [*slow({"dtype": "float16"}), {"expert_dtype": "q8_0"}]
)
def test_a_source_with_checksums_is_read_once(change, tmp_path, monkeypatch):
    """What is cast has another hash than its source; CRCs vouch for that as well."""
    raw = raw_config("olmoe", hidden_size=96, intermediate_size=32)
    convert(write_folder(tmp_path / "hf", raw), tmp_path / "ours")
    read, whole = [], work_module.content_sha256

    def noted(reader):
        read.append(reader.path)
        return whole(reader)

    monkeypatch.setattr(work_module, "content_sha256", noted)
    convert(tmp_path / "ours", tmp_path / "new", **change)
    assert read == []
    as_version_1(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "old", **change)
    assert read == [tmp_path / "ours"]


def test_verify_reads_a_checkpoint_of_ours_and_writes_nothing(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    digest = convert(hf, tmp_path / "ours")["content_sha256"]
    found = convert(tmp_path / "ours", None, verify=True)
    assert found["verified"] and found["content_sha256"] == digest
    with pytest.raises(ConfigError, match="hf is a Hugging Face folder, which states"):
        convert(hf, None, verify=True)
    with pytest.raises(ConfigError, match="--verify writes nothing, got --dst x"):
        convert(tmp_path / "ours", "x", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_open_checkpoint_rejects_other_folders(tmp_path):
    with pytest.raises(CheckpointError, match="nope is not a folder"):
        open_checkpoint(tmp_path / "nope")
    with pytest.raises(CheckpointError, match="neither manifest.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold an object"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("free", [1000, 10**9])
def test_full_disk_is_one_error_and_nothing_more(free, tmp_path, monkeypatch, capfd):
    """Too little room is said before a byte is written; later, Orbax's errors are."""
    hf = hf_folder(tmp_path / "hf", "olmoe")
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage)

    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: no space\nand a stack")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", full)
    expected = (
        "No space left .* 1000 free.*" if free == 1000 else "EXHAUSTED: no space$"
    )
    with pytest.raises(OutputError, match=f"converting .* failed: .*{expected}"):
        convert(hf, tmp_path / "out")
    assert capfd.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
