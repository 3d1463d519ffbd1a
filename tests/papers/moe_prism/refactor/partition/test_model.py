"""Partitions of a whole model: streaming, resume, rules, determinism."""

import dataclasses
import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.papers.moe_prism.refactor.partition.model import partition_model
from moe_edge.papers.moe_prism.refactor.partition.problem import planted_activations
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions

OPTIONS = PartitionOptions(inactive=2, restarts=4)


@dataclasses.dataclass
class FakeSource:
    """Two layers of three experts; expert 2 has few tokens, layer 5's none."""

    layers = (1, 5)
    num_experts = 3
    neurons = 16
    reads: list = dataclasses.field(default_factory=list)

    def activations(self, layer, expert):
        self.reads.append((layer, expert))
        tokens = 100 if expert < 2 else (10 if layer == 1 else 0)
        M_TF, _ = planted_activations(tokens, 16, clusters=4, seed=10 * layer + expert)
        return M_TF.astype(np.float16)

    def gate_weights(self, layer, expert):
        return np.linspace(0, 1, 100, dtype=np.float32)


WEIGHTS = {layer: np.tile(np.arange(16.0), (3, 1)) for layer in (1, 5)}


def test_partition_model_covers_all_experts_and_counts_rules(tmp_path):
    found = partition_model(FakeSource(), tmp_path, OPTIONS)
    assert found.labels_LEF.shape == (2, 3, 16)
    for labels in found.labels_LEF.reshape(-1, 16):
        assert np.bincount(labels).tolist() == [4] * 4
    summary = found.summary()
    assert summary["rules"] == {"solved": 4, "contiguous": 2}
    shares = summary["shares"]["fitted"]
    assert shares["partition"] <= shares["random"] and "magnitude" in shares
    solved = [row for row in found.experts if row["rule"] == "solved"]
    assert all(len(row["heldout"]["partition"]["usage"]) == 4 for row in solved)
    assert summary["objective"] > summary["objective_heldout"] > 0
    assert found.labels_LEF[1, 2].tolist() == np.repeat(range(4), 4).tolist()


def test_shares_compare_the_same_experts(tmp_path):
    found = partition_model(FakeSource(), tmp_path, OPTIONS)
    shares = found.summary()["shares"]
    solved = [row for row in found.experts if row["rule"] == "solved"]
    few = [row for row in found.experts if row["rule"] != "solved" and row["fitted"]]
    assert few  # expert 2 of layer 1 has tokens, and no baselines
    for part in ("fitted", "heldout"):
        for name in ("partition", "random"):
            scores = [row[part][name] for row in solved]
            left_out, total = (
                sum(score[key] for score in scores) for key in ("objective", "total")
            )
            assert shares[part][name] == pytest.approx(left_out / total, rel=1e-12)


def test_partition_model_few_tokens_fall_back_on_neuron_weights(tmp_path):
    found = partition_model(FakeSource(), tmp_path, OPTIONS, neuron_weights=WEIGHTS)
    assert found.summary()["rules"] == {"solved": 4, "neuron_weights": 2}
    expected = np.repeat([3, 2, 1, 0], 4)
    np.testing.assert_array_equal(found.labels_LEF[0, 2], expected)


def test_partition_model_does_not_solve_silent_experts(tmp_path):
    class Silent(FakeSource):
        def activations(self, layer, expert):
            M_TF = super().activations(layer, expert)
            return M_TF * np.float16(expert != 1)

    found = partition_model(Silent(), tmp_path, OPTIONS, neuron_weights=WEIGHTS)
    assert found.summary()["rules"] == {"solved": 2, "neuron_weights": 4}


def test_partition_model_resumes_and_does_not_depend_on_threads(tmp_path):
    first = partition_model(FakeSource(), tmp_path / "a", OPTIONS, threads=1)
    other = partition_model(FakeSource(), tmp_path / "b", OPTIONS, threads=3)
    np.testing.assert_array_equal(first.labels_LEF, other.labels_LEF)
    (tmp_path / "a" / "layer_005.json").unlink()  # killed in the second layer
    source = FakeSource()
    again = partition_model(source, tmp_path / "a", OPTIONS)
    assert {layer for layer, _ in source.reads} == {5}
    np.testing.assert_array_equal(first.labels_LEF, again.labels_LEF)
    assert [r["expert"] for r in again.experts] == [0, 1, 2] * 2
    (tmp_path / "a" / "layer_001.json").write_bytes(b"half")  # a damaged file too
    source = FakeSource()
    partition_model(source, tmp_path / "a", OPTIONS)
    assert {layer for layer, _ in source.reads} == {1}


@pytest.mark.parametrize(
    "labels",
    [
        [[0, 1, 2, 3, 0]] * 3,  # of another shape
        [[0, 1, 2, 3] * 4] * 2,
        [[0, 1, 2, 7] * 4] * 3,  # no sub-expert 7
        [[0] * 16] * 3,  # out of balance
        [[0.0, 1.0, 2.0, 3.0] * 4] * 3,
        [[0, 1], [2]],
        None,
    ],
)
def test_partition_model_makes_a_layer_of_bad_labels_again(tmp_path, labels):
    first = partition_model(FakeSource(), tmp_path, OPTIONS)
    path = tmp_path / "layer_005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"labels": labels}))
    source = FakeSource()
    again = partition_model(source, tmp_path, OPTIONS)
    assert {layer for layer, _ in source.reads} == {5}
    np.testing.assert_array_equal(first.labels_LEF, again.labels_LEF)


@pytest.mark.parametrize("rows", ["[]", "{}", "3", '{"seconds": 1, "experts": [{}]}'])
def test_partition_model_makes_a_layer_of_bad_rows_again(tmp_path, rows):
    partition_model(FakeSource(), tmp_path, OPTIONS)
    (tmp_path / "layer_001.json").write_text(rows)
    source = FakeSource()
    again = partition_model(source, tmp_path, OPTIONS)
    assert {layer for layer, _ in source.reads} == {1}
    assert [r["expert"] for r in again.experts] == [0, 1, 2] * 2


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_partition_model_rejects_settings_that_are_none(tmp_path, text):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(OutputError, match="settings.json holds no settings; remove"):
        partition_model(FakeSource(), tmp_path, OPTIONS)


def test_partition_model_seconds_are_of_earlier_calls_too(tmp_path):
    partition_model(FakeSource(), tmp_path, OPTIONS)
    path = tmp_path / "layer_001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 1000.0}))
    again = partition_model(FakeSource(), tmp_path, OPTIONS)
    assert again.seconds > 1000 and again.summary()["seconds"] == again.seconds


def test_partition_model_rejects_other_settings_in_the_folder(tmp_path):
    partition_model(FakeSource(), tmp_path, OPTIONS)
    changed = dataclasses.replace(OPTIONS, inactive=3, seed=1)
    with pytest.raises(OutputError, match="made with another inactive, seed;"):
        partition_model(FakeSource(), tmp_path, changed)
    with pytest.raises(OutputError, match="made with another fingerprint;"):
        partition_model(FakeSource(), tmp_path, OPTIONS, fingerprint="other")


def test_partition_model_gate_weights_change_the_solution(tmp_path):
    plain = partition_model(FakeSource(), tmp_path / "a", OPTIONS)
    weighted = partition_model(
        FakeSource(),
        tmp_path / "b",
        dataclasses.replace(OPTIONS, weigh_tokens=True),
    )
    assert not np.array_equal(plain.labels_LEF, weighted.labels_LEF)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sub_experts": 3}, "16 neurons do not split into 3"),
        ({"inactive": 4}, r"inactive is 4, expected 1\.\.3"),
        ({"solver": "magic"}, "unknown solver 'magic'"),
        ({"heldout_ratio": -0.1}, "heldout_ratio is -0.1"),
        ({"min_tokens": 0}, "min_tokens must be a positive whole number, got 0"),
    ],
)
def test_partition_model_rejects_bad_options(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        partition_model(
            FakeSource(), tmp_path / "w", dataclasses.replace(OPTIONS, **change)
        )
    assert not (tmp_path / "w").exists()


def test_partition_model_reports_are_plain_json(tmp_path):
    found = partition_model(FakeSource(), tmp_path, OPTIONS)
    json.dumps([found.experts, found.summary()], allow_nan=False)
