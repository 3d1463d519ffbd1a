"""Tensors that the model does not need: each is checked before it is left out."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from moe_edge.convert import tensor_source
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError
from tests.support.conversion import assert_same_tensors, convert, load_all
from tests.support.tiny_checkpoints import random_tensors, raw_config, write_folder

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def tied(folder, head=None):
    """A tied model's folder, with a head in the file if one is given."""
    raw = raw_config("qwen2_moe")
    tensors = random_tensors(raw)
    if head is not None:
        tensors[HEAD] = head(tensors[EMBED])
    return write_folder(folder, raw, tensors), tensors


def test_stored_head_that_differs_is_kept_through_every_conversion(tmp_path):
    hf, tensors = tied(tmp_path / "hf", lambda embed: embed[::-1])
    reader = open_checkpoint(hf)
    assert not reader.config.tie_embeddings
    np.testing.assert_array_equal(reader.top()["head"], tensors[HEAD])
    result = convert(hf, tmp_path / "ours")
    assert result["dropped"] == []
    ours = open_checkpoint(tmp_path / "ours")
    np.testing.assert_array_equal(ours.top()["head"], tensors[HEAD])
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_tensors(load_all(tmp_path / "back"), tensors)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    hashes = {open_checkpoint(tmp_path / n).content_sha256() for n in ("hf", "back")}
    assert hashes == {result["content_sha256"]}


def test_stored_head_that_equals_the_embedding_is_left_out(tmp_path, capfd):
    hf, tensors = tied(tmp_path / "hf", np.array)
    assert convert(hf, tmp_path / "ours")["dropped"] == [HEAD]
    assert "head" not in open_checkpoint(tmp_path / "ours").top()
    assert f"{hf}: left out, as the model does not use them: {HEAD}" in (
        capfd.readouterr().err
    )


def test_stored_head_of_another_dtype_is_compared_by_value(tmp_path):
    same, _ = tied(tmp_path / "a", lambda embed: embed.astype(np.float64))
    assert open_checkpoint(same).dropped == [HEAD]
    rounded, _ = tied(tmp_path / "b", lambda embed: embed.astype(ml_dtypes.bfloat16))
    assert open_checkpoint(rounded).dropped == []


def test_stored_head_is_compared_to_its_last_row(tmp_path, monkeypatch):
    def head(embed):
        changed = np.array(embed)
        changed[-1, -1] += 1
        return changed

    monkeypatch.setattr(tensor_source, "_ROWS", 2)  # compared together
    differs, tensors = tied(tmp_path / "a", head)
    assert open_checkpoint(differs).dropped == []
    same, _ = tied(tmp_path / "b", np.array)
    assert open_checkpoint(same).dropped == [HEAD]


def test_use_of_a_stored_head_against_the_config_is_printed(tmp_path, capfd):
    hf, _ = tied(tmp_path / "hf", lambda embed: 2 * embed)
    open_checkpoint(hf)
    assert f"{hf}: {HEAD} differs from the embedding" in capfd.readouterr().err


def test_stored_head_of_another_shape_is_refused(tmp_path):
    hf, _ = tied(tmp_path / "hf", lambda embed: embed[:-1])
    with pytest.raises(CheckpointError, match=r"shape \(100, 48\), expected"):
        open_checkpoint(hf)


def test_head_alone_is_the_embedding_of_a_tied_model(tmp_path):
    raw = raw_config("qwen2_moe")
    tensors = random_tensors(raw)
    stored = dict(tensors)
    stored[HEAD] = stored.pop(EMBED)
    reader = open_checkpoint(write_folder(tmp_path / "hf", raw, stored))
    np.testing.assert_array_equal(reader.top()["embed"], tensors[EMBED])


def frequencies(theta, dim=12):
    return (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotary_frequencies_of_the_config_are_left_out(dtype, tmp_path):
    raw = raw_config("olmoe")
    stored = frequencies(9000.0).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    tensors = random_tensors(raw) | {FREQUENCIES: stored}
    hf = write_folder(tmp_path / "hf", raw, tensors)
    assert open_checkpoint(hf).dropped == [FREQUENCIES]


def test_unscaled_frequencies_of_a_scaled_rope_are_left_out(tmp_path):
    raw = raw_config("olmoe", rope_scaling={"type": "linear", "factor": 3.0})
    for number, stored in enumerate((frequencies(9000.0), frequencies(9000.0) / 3)):
        tensors = random_tensors(raw) | {FREQUENCIES: stored}
        hf = write_folder(tmp_path / str(number), raw, tensors)
        assert open_checkpoint(hf).dropped == [FREQUENCIES]


@pytest.mark.parametrize(
    "stored", [frequencies(10_000.0), frequencies(9000.0)[:-1], np.arange(6)]
)
def test_rotary_frequencies_of_another_rope_are_refused(stored, tmp_path):
    raw = raw_config("olmoe")
    tensors = random_tensors(raw) | {FREQUENCIES: stored}
    hf = write_folder(tmp_path / "hf", raw, tensors)
    with pytest.raises(CheckpointError, match=f"{FREQUENCIES} .*theta 9000.0"):
        open_checkpoint(hf)


def test_rotary_frequencies_are_compared_without_jax(tmp_path):
    tensors = random_tensors(raw_config("olmoe")) | {FREQUENCIES: frequencies(9000.0)}
    hf = write_folder(tmp_path / "hf", raw_config("olmoe"), tensors)
    text = (
        "import sys; from moe_edge.convert.open import open_checkpoint; "
        "from moe_edge.convert.check import check_checkpoint; "
        f"print(*check_checkpoint({str(hf)!r}).unused); "
        f"print(open_checkpoint({str(hf)!r}).dropped, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{FREQUENCIES}\n{[FREQUENCIES]} False\n"


def test_layer_behind_the_last_is_dropped_only_as_a_module_of_later_tokens(tmp_path):
    raw = raw_config("deepseek_v3", num_hidden_layers=4)
    tensors = random_tensors(raw)  # of one layer more than its config.json will say
    hf = write_folder(tmp_path / "hf", raw | {"num_hidden_layers": 3}, tensors)
    with pytest.raises(CheckpointError, match="unexpected model.layers.3.*and .* more"):
        open_checkpoint(hf)
    tensors["model.layers.3.eh_proj.weight"] = np.ones((2, 3), np.float32)
    hf = write_folder(tmp_path / "mtp", raw | {"num_hidden_layers": 3}, tensors)
    dropped = open_checkpoint(hf).dropped
    assert sorted(dropped) == sorted(n for n in tensors if ".layers.3." in n)
    # The config says one module: a second one is no such module.
    raw |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    tensors["model.layers.2.eh_proj.weight"] = np.ones((2, 3), np.float32)
    hf = write_folder(tmp_path / "two", raw, tensors)
    with pytest.raises(CheckpointError, match="unexpected model.layers.3.*and .* more"):
        open_checkpoint(hf)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_modules_of_later_tokens_are_left_out_of_every_family(family, tmp_path):
    raw = raw_config(family)
    later = [
        *("mtp.fc.weight", "model.mtp.layers.0.norm.weight", "model.mtp_block.0.a"),
        *("model.layers.3.eh_proj.weight_packed", "model.layers.3.mlp.gate.weight"),
        *("layers.4.eh_proj.weight", "layers.4.enorm.weight"),
    ]
    more = dict.fromkeys(later, np.ones((2, 3), np.float32))
    tensors = random_tensors(raw)
    reader = open_checkpoint(write_folder(tmp_path / "hf", raw, tensors | more))
    assert sorted(reader.dropped) == sorted(later)
    for name in ("model.layers.5.norm.weight", "smtp.fc.weight", "model.layers.2.mtp"):
        extra = more | {name: np.ones((2, 3), np.float32)}
        hf = write_folder(tmp_path / name, raw, tensors | extra)
        with pytest.raises(CheckpointError, match=f"config: unexpected {name};"):
            open_checkpoint(hf)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_shared_expert_without_neurons_is_no_shared_expert(family, tmp_path):
    name = {"qwen2_moe": "shared_expert_intermediate_size"}.get(
        family, "n_shared_experts"
    )
    raw = raw_config(family, **{name: 0})
    tensors = random_tensors(raw)
    prefix = "model.layers.2.mlp.shared_expert" + "s" * (family != "qwen2_moe")
    empty = {
        f"{prefix}.gate_proj.weight": np.empty((0, 48), np.float32),
        f"{prefix}.up_proj.weight": np.empty((0, 48), np.float32),
        f"{prefix}.down_proj.weight": np.empty((48, 0), np.float32),
    }
    if family == "qwen2_moe":
        empty["model.layers.2.mlp.shared_expert_gate.weight"] = np.ones((1, 48), "f4")
    hf = write_folder(tmp_path / "hf", raw, tensors | empty)
    reader = open_checkpoint(hf)
    assert reader.config.moe.shared_dim == 0 and not reader.config.moe.shared_gate
    assert sorted(reader.dropped) == sorted(empty)
    alone = {n: a for n, a in empty.items() if n.endswith("expert_gate.weight")}
    if alone:
        hf = write_folder(tmp_path / "alone", raw, tensors | alone)
        with pytest.raises(CheckpointError, match="unexpected .*shared_expert_gate"):
            open_checkpoint(hf)
    used = {f"{prefix}.gate_proj.weight": np.ones((2, 48), np.float32)}
    hf = write_folder(tmp_path / "used", raw, tensors | used)
    with pytest.raises(CheckpointError, match=f"unexpected {prefix}.gate_proj"):
        open_checkpoint(hf)
