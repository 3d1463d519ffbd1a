"""Refactored checkpoints compute what their parents compute."""

import json

import ml_dtypes
import numpy as np
import pytest

from moe_edge.checkpoint.manifest import read_manifest
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_writer import write_refactored
from moe_edge.convert.stream import content_sha256
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.model.sub_experts import at_k
from moe_edge.papers.moe_prism.refactor.build import down_norms
from tests.support.conversion import convert
from tests.support.quantised import fp8_folder
from tests.support.refactored import (
    SUBS,
    UNGROUPED,
    hidden_states,
    layer_output,
    parent_folder,
    random_refactoring,
    relative_error,
    write_random,
)
from tests.support.slow_cases import slow_but
from tests.support.tiny_checkpoints import KINDS_OF_EXPERTS

GATE_B = 1e-5


def outputs(reader, k, layer):
    config = at_k(reader.config, k)
    x_TD = hidden_states(config.d_model)
    return layer_output(reader, config, layer, x_TD)


@pytest.mark.parametrize("family", slow_but(["qwen2_moe", "gpt_oss"], KINDS_OF_EXPERTS))
def test_linear_gate_at_whole_experts_is_the_parent(family, tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", family))
    child = open_checkpoint(write_random(parent.path, tmp_path / "r"))
    layer = parent.config.moe_layers[-1]
    top_k = parent.config.moe.top_k
    assert child.config.moe.top_k == SUBS * top_k
    counts = [2, top_k]  # fewer than its own, as many
    counts += [top_k + 1] * (family in ("olmoe", "deepseek_v3"))
    parents = {k: outputs(parent, k, layer) for k in counts}
    for k, (_, expected) in parents.items():
        _, got = outputs(child, SUBS * k, layer)
        assert relative_error(got, expected) <= GATE_B, k
    # Between two multiples the next expert's first, most important blocks run.
    ids, _ = outputs(child, SUBS + 2, layer)
    parents_T2 = np.asarray(parents[2][0].ids_TK)
    expected = np.concatenate(
        [
            parents_T2[:, :1] * SUBS + np.arange(SUBS),
            parents_T2[:, 1:] * SUBS + np.arange(2),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(np.sort(ids.ids_TK), np.sort(expected))


@pytest.mark.parametrize(
    ("family", "gate"),
    slow_but(
        [
            ("mixtral", "proxy_global"),
            ("deepseek_v3", "calibrated"),
            ("gpt_oss", "proxy_pattern"),
        ],
        [
            (family, ("proxy_pattern", "proxy_global", "calibrated")[row % 3])
            for row, family in enumerate(KINDS_OF_EXPERTS)
            if family != "gemma4_text"  # a linear gate alone
        ],
    ),
)
def test_gate_of_blocks_with_all_of_them_is_the_parent(family, gate, tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", family, gate))
    child = open_checkpoint(write_random(parent.path, tmp_path / "r", gate))
    layer = parent.config.moe_layers[-1]
    _, expected = outputs(parent, None, layer)
    _, got = outputs(child, None, layer)
    assert relative_error(got, expected) <= GATE_B
    # One block less is another sum: the comparison sees a single block.
    fewer = child.config.moe.top_k - 1
    routing, less = outputs(child, fewer, layer)
    assert relative_error(less, expected) > 10 * GATE_B
    assert all(len(set(row)) == fewer for row in np.asarray(routing.ids_TK).tolist())


def test_manifest_says_where_it_came_from(tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", "olmoe"))
    refactoring = random_refactoring(parent)
    refactoring.origin.update(seed=3, parent_sha256=parent.content_sha256())
    digest = write_refactored(parent, refactoring, tmp_path / "r")
    manifest = read_manifest(tmp_path / "r")
    assert manifest["content_sha256"] == digest
    assert digest == content_sha256(open_checkpoint(tmp_path / "r"))
    assert manifest["U"] == SUBS and manifest["E"] == 6
    assert manifest["hf_config"] == parent.config.hf_config
    assert manifest["refactor"] == {
        "gate": "linear",
        "gate_neurons": 0,
        "rank_shares": [],
        "fine_tuned": None,
        "seed": 3,
        "parent_sha256": parent.content_sha256(),
    }
    stored = (tmp_path / "r" / "hf" / "config.json").read_bytes()
    assert stored == (tmp_path / "hf" / "config.json").read_bytes()


def test_a_refactored_model_is_not_refactored_again(tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", "olmoe"))
    child = open_checkpoint(write_random(parent.path, tmp_path / "r", subs=2))
    with pytest.raises(ConfigError, match="refactored already, into 2"):
        random_refactoring(child)


@pytest.mark.parametrize("gate", ["linear", "proxy_global", "calibrated"])
def test_exchanged_files_and_damaged_blocks_are_refused(gate, tmp_path):
    """The checksums of a refactored checkpoint are of its blocks."""
    write_random(parent_folder(tmp_path / "hf", "olmoe"), tmp_path / "r", gate)
    reader = open_checkpoint(tmp_path / "r")
    assert len(reader.checksums.experts[0]) == reader.config.moe.num_experts
    path, record = tmp_path / "r" / "experts/layer_000.bin", reader.experts(0)[5]
    data = bytearray(path.read_bytes())
    data[5 * record.nbytes + 8] ^= 64
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="layer_000.bin: record 5 has CRC-32"):
        reader.experts(0)
    path.with_name("layer_001.bin").replace(path)
    with pytest.raises(CheckpointError, match="holds the experts of layer 1, expec"):
        open_checkpoint(tmp_path / "r")


def test_nothing_appears_where_it_fails(tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", "olmoe"))
    refactoring = random_refactoring(parent)
    refactoring.labels[2][0, 0] = (refactoring.labels[2][0, 0] + 1) % SUBS
    with pytest.raises(ConfigError, match="labels must put 5 of 20 neurons"):
        write_refactored(parent, refactoring, tmp_path / "r")
    with pytest.raises(OutputError, match="is not empty"):
        write_refactored(parent, refactoring, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_bfloat16_blocks_are_exact_multiples(tmp_path):
    folder = parent_folder(tmp_path / "hf", "mixtral", torch_dtype="bfloat16")
    parent = open_checkpoint(folder)
    child = open_checkpoint(write_random(folder, tmp_path / "r"))
    down = parent.layout.part(parent.experts(0), "down").astype(np.float64)
    got = child.layout.part(np.asarray(child.experts(0)), "down")
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(got.astype(np.float64).sum(), 4 * down.sum(), rtol=1e-12)


def test_a_quantised_parent_is_unquantised_once_split(tmp_path):
    raw = {"moe_intermediate_size": 32} | UNGROUPED["deepseek_v3"]
    hf, _ = fp8_folder(tmp_path / "hf", **raw)
    write_random(hf, tmp_path / "r")
    config = read_manifest(tmp_path / "r")["hf_config"]
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    stored = json.loads((tmp_path / "r" / "hf" / "config.json").read_text())
    assert stored == config
    convert(tmp_path / "r", tmp_path / "out", to="hf")
    exported = open_checkpoint(tmp_path / "out")
    assert "quantization_config" not in exported.config.hf_config
    child = open_checkpoint(tmp_path / "r")
    layer = child.config.moe_layers[-1]
    np.testing.assert_array_equal(exported.experts(layer), child.experts(layer))


@pytest.mark.parametrize("name", ["gate", "down"])
def test_weights_that_are_not_finite_are_refused(name, tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", "mixtral"))
    records = np.array(parent.experts(0))
    parent.layout.part(records, name)[1, 0, 0] = np.nan
    parent.read_experts = lambda layer, first, out: np.copyto(
        out, records[first : first + len(out)]
    )
    with pytest.raises(CheckpointError, match=r"experts\.1\.w\d\S* has NaN"):
        write_refactored(parent, random_refactoring(parent), tmp_path / "r")
    with pytest.raises(CheckpointError, match="has NaN or infinite values"):
        down_norms(parent, 0)


def test_dense_weights_that_are_not_finite_are_refused(tmp_path):
    parent = open_checkpoint(parent_folder(tmp_path / "hf", "mixtral"))
    dense = parent.dense
    parent.dense = lambda item: {
        name: np.full_like(a, np.inf) if name == "router.weight" else a
        for name, a in dense(item).items()
    }
    with pytest.raises(CheckpointError, match="gate.weight has NaN or infinite values"):
        write_refactored(parent, random_refactoring(parent), tmp_path / "r")


def test_overflow_is_refused(tmp_path):
    folder = parent_folder(tmp_path / "hf", "mixtral", torch_dtype="float16")
    parent = open_checkpoint(folder)
    records = np.array(parent.experts(0))
    parent.layout.part(records, "down")[0, 0, 0] = 40_000.0
    parent.read_experts = lambda layer, first, out: np.copyto(
        out, records[first : first + len(out)]
    )
    with pytest.raises(CheckpointError, match="times 4 overflow float16"):
        write_refactored(parent, random_refactoring(parent), tmp_path / "r")
    json.dumps(random_refactoring(parent).manifest())


def test_records_that_come_in_parts_give_the_same_files(tmp_path, monkeypatch):
    """As of layers that are too large for one buffer."""
    hf = parent_folder(tmp_path / "hf", "olmoe")
    whole = write_random(hf, tmp_path / "whole")
    monkeypatch.setattr("moe_edge.convert.content_hash.CHUNK_BYTES", 1)
    parts = write_random(hf, tmp_path / "parts")
    assert read_manifest(parts) == read_manifest(whole)
    for path in sorted((whole / "experts").iterdir()):
        assert (parts / path.relative_to(whole)).read_bytes() == path.read_bytes()
