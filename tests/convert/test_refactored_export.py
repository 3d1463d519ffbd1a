"""Refactored checkpoints as Hugging Face folders: round trips and refusals."""

import json

import numpy as np
import pytest

from moe_edge.checkpoint.manifest import read_manifest
from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_config import EXPORTED, refactored_hf_config
from moe_edge.convert.stream import content_sha256
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.model.sub_experts import at_k
from tests.support.conversion import convert
from tests.support.refactored import (
    hidden_states,
    layer_output,
    parent_folder,
    wide_parent,
    write_random,
)
from tests.support.slow_cases import slow_but
from tests.support.tiny_checkpoints import KINDS_OF_EXPERTS

EXPORTS = [family for family in KINDS_OF_EXPERTS if family in EXPORTED]


@pytest.mark.parametrize("family", slow_but(["olmoe", "deepseek_v3"], EXPORTS))
def test_export_holds_the_same_model(family, tmp_path):
    parent = wide_parent(tmp_path / "hf", family)
    ours = write_random(parent, tmp_path / "r")
    summary = convert(ours, tmp_path / "out", to="hf")
    before, after = open_checkpoint(ours), open_checkpoint(tmp_path / "out")
    assert isinstance(after, HfReader)
    moe = after.config.moe
    assert (moe.num_experts, moe.top_k, moe.expert_dim) == (24, 12, 8)
    assert moe.shared_dim == before.parent_config.moe.shared_dim
    assert moe.sub_experts == 1
    # One hash: a refactored checkpoint is the model that it is exported as.
    assert summary["content_sha256"] == read_manifest(ours)["content_sha256"]
    assert content_sha256(after) == summary["content_sha256"]
    layer = after.config.moe_layers[-1]
    np.testing.assert_array_equal(after.experts(layer), before.experts(layer))
    x_TD = hidden_states(after.config.d_model)
    expected, got = (
        layer_output(reader, at_k(reader.config, 5), layer, x_TD)[1]
        for reader in (before, after)
    )
    np.testing.assert_array_equal(got, expected)


def test_other_fields_and_files_are_carried_over(tmp_path):
    parent = wide_parent(tmp_path / "hf", "deepseek_v2", max_length=77)
    (parent / "generation_config.json").write_text('{"eos_token_id": 9}')
    write_random(parent, tmp_path / "r")
    convert(tmp_path / "r", tmp_path / "out", to="hf")
    before = json.loads((parent / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "n_shared_experts",
    }
    assert after["n_shared_experts"] == 8 and after["n_group"] == 3
    assert open_checkpoint(tmp_path / "out").config.eos_ids == (9,)


def test_a_cast_export_is_cast(tmp_path):
    write_random(wide_parent(tmp_path / "hf", "olmoe"), tmp_path / "r")
    convert(tmp_path / "r", tmp_path / "out", to="hf", dtype="bfloat16")
    assert open_checkpoint(tmp_path / "out").dtype.name == "bfloat16"


def test_sizes_in_the_words_of_other_families_are_left_out(tmp_path):
    sizes = {"moe_intermediate_size": 32, "n_routed_experts": 6, "n_shared_experts": 0}
    folder = wide_parent(tmp_path / "hf", "mixtral", experts_per_token=3, **sizes)
    raw = refactored_hf_config(
        open_checkpoint(write_random(folder, tmp_path / "r")).config
    )
    assert raw.keys().isdisjoint({*sizes, "experts_per_token"})
    assert (raw["num_local_experts"], raw["intermediate_size"]) == (24, 8)


def test_aliases_of_a_field_change_together(tmp_path):
    folder = wide_parent(tmp_path / "hf", "mixtral", num_experts=6)
    raw = refactored_hf_config(
        open_checkpoint(write_random(folder, tmp_path / "r")).config
    )
    assert raw["num_local_experts"] == raw["num_experts"] == 24


def test_absent_fields_are_written(tmp_path):
    """Defaults of the family are the parent's, not the child's."""
    folder = wide_parent(tmp_path / "hf", "mixtral")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("num_experts_per_tok")  # transformers' default is 2
    path.write_text(json.dumps(raw))
    write_random(folder, tmp_path / "r")
    convert(tmp_path / "r", tmp_path / "out", to="hf")
    assert open_checkpoint(tmp_path / "out").config.moe.top_k == 8


@pytest.mark.parametrize(
    ("family", "gate", "wide", "message"),
    [
        ("olmoe", "proxy_global", True, "a proxy_global gate chooses blocks"),
        ("olmoe", "calibrated", True, "refactor with --gate lg or lg_ft"),
        ("deepseek_v3", "proxy_global", True, "a proxy_global gate"),
        ("olmoe", "linear", False, "sub-experts of 5 neurons.* have no such split"),
        ("gpt_oss", "linear", True, "models of gpt_oss have no export; known: deep"),
        ("xverse", "linear", True, "models of xverse have no export"),
    ],
)
def test_what_cannot_be_expressed_is_refused(family, gate, wide, message, tmp_path):
    make = wide_parent if wide else parent_folder
    changes = {"n_group": 3, "topk_group": 2} if family == "deepseek_v3" else {}
    write_random(make(tmp_path / "hf", family, **changes), tmp_path / "r", gate)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "r", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_group_routing_by_two_experts_has_no_linear_gate(tmp_path):
    folder = wide_parent(tmp_path / "hf", "deepseek_v3", n_group=3, topk_group=2)
    with pytest.raises(ConfigError, match="sum of a group's two best experts"):
        write_random(folder, tmp_path / "r")


def test_width_names_the_splits_that_fit(tmp_path):
    folder = parent_folder(tmp_path / "hf", "olmoe", intermediate_size=48)
    write_random(folder, tmp_path / "r")
    with pytest.raises(ConfigError, match="48 neurons split into 1, 2, 3, 6"):
        convert(tmp_path / "r", tmp_path / "out", to="hf")


def test_ours_is_not_converted_to_ours(tmp_path):
    write_random(wide_parent(tmp_path / "hf", "olmoe"), tmp_path / "r")
    with pytest.raises(CheckpointError, match="is refactored and in our format"):
        convert(tmp_path / "r", tmp_path / "out", dtype="bfloat16")
