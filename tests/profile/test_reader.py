"""A profile is read only if it is whole, and only for its own checkpoint."""

import json
import shutil

import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    tiny = write_tiny_checkpoint(folder / "tiny")
    (folder / "t.txt").write_text(TEXT)
    run_profile(
        out_dir=str(folder / "p"),
        checkpoint=str(tiny),
        text=str(folder / "t.txt"),
        max_tokens_per_expert=20,
    )
    return folder / "p"


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "p")


def count_lines(folder):
    lines = (folder / "counts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_arrays_are_parallel_and_bounded(made):
    found = open_profile(made)
    kept = []
    for layer in found.layers:
        for expert in range(found.num_experts):
            rows = len(found.activations(layer, expert))
            assert rows == min(20, found.tokens_of(layer, expert))
            assert found.gate_weights(layer, expert).shape == (rows,)
            assert found.ranks(layer, expert).shape == (rows,)
            kept.append(rows)
    assert max(kept) == 20 and found.neurons == 16 and found.top_k == 2


def test_expert_without_tokens_has_no_rows(copy):
    first, *rows = count_lines(copy)
    assert first["layer"] == 0
    first["counts"][0] += first["counts"][3]
    first["counts"][3] = 0
    lines = [json.dumps(row) + "\n" for row in [first, *rows]]
    (copy / "counts.jsonl").write_text("".join(lines))
    np.save(copy / "activations" / "000_003.npy", np.zeros((0, 16), np.float16))
    assert open_profile(copy).activations(0, 3).shape == (0, 16)


def test_profile_of_another_checkpoint_is_refused(made):
    found = open_profile(made)
    found.check(found.info["content_sha256"])
    with pytest.raises(CheckpointError, match="moe-edge profile_model"):
        found.check("0" * 64)


@pytest.mark.parametrize("at", [(2, 0), (0, 8), (0, -1)])
def test_unknown_place_is_refused(made, at):
    with pytest.raises(ConfigError, match="has no expert"):
        open_profile(made).activations(*at)


def test_damaged_arrays_are_refused(copy):
    path = copy / "activations" / "001_002.npy"
    whole = path.read_bytes()
    found = open_profile(copy)
    for broken in (whole[:-7], whole[:20], b"", b"junk" * 50):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"001_002\.npy"):
            found.activations(1, 2)
    for array in (
        np.zeros((3, 16), np.float16),
        np.zeros((20, 16), np.float32),
        np.zeros((20, 15), np.float16),
    ):
        np.save(path, array)
        with pytest.raises(CheckpointError, match="expected float16"):
            found.activations(1, 2)
    np.save(path, np.array([{"code": "run"}], object), allow_pickle=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.activations(1, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match="lacks the activations of expert 2"):
        open_profile(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 2}, "format_version 2"),
        ({"E": "8"}, "wrong E"),
        ({"E": 10**12}, "wrong E"),
        ({"layers": []}, "layers"),
        ({"content_sha256": None}, "content_sha256"),
        ({"domains": ["t", "u"]}, "lacks a domain"),
        ({"domains": ["u"]}, "does not fit"),
        ({"E": 9}, "does not fit"),
    ],
)
def test_damaged_facts_are_refused(copy, change, words):
    info = json.loads((copy / "profile.json").read_text())
    (copy / "profile.json").write_text(json.dumps(info | change))
    with pytest.raises(CheckpointError, match=words):
        open_profile(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": [5]}, "expected 8 whole numbers"),
        ({"counts": 5}, "expected 8 whole numbers"),
        ({"counts": "12345678"}, "expected 8 whole numbers"),
        ({"shift": 0.5}, "expected 8 whole numbers"),
        ({"shift": True}, "sum to"),
        ({"shift": -(10**6)}, "expected 8 whole numbers"),
        ({"shift": 1}, "sum to"),
        ({"shift": 10**30}, "sum to"),
        ({"tokens": 5}, "tokens x 2 choices"),
        ({"tokens": None}, "tokens x 2 choices"),
        ({"layer": 1}, "stand twice"),
        ({"scale": 2}, "tokens in each"),
    ],
)
def test_wrong_counts_are_refused(copy, change, words):
    rows = count_lines(copy)
    row, shift, scale = rows[0], change.pop("shift", 0), change.pop("scale", 1)
    row["counts"] = [count * scale for count in row["counts"]]
    row["counts"][0] += shift
    row["tokens"] *= scale
    lines = [json.dumps(one) + "\n" for one in (row | change, *rows[1:])]
    (copy / "counts.jsonl").write_text("".join(lines))
    with pytest.raises(CheckpointError, match=words):
        open_profile(copy)


@pytest.mark.parametrize("text", ["", "{", "[]\n", "\xff"])
def test_damaged_files_are_refused(copy, text):
    (copy / "counts.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"counts\.jsonl"):
        open_profile(copy)
    (copy / "profile.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"profile\.json"):
        open_profile(copy)
    with pytest.raises(CheckpointError, match="holds no"):
        open_profile(copy / "activations")
