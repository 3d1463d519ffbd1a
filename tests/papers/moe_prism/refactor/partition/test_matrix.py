"""The one-matrix mode, and reports on held-out tokens."""

import json

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.papers.moe_prism.refactor.partition.matrix import (
    heldout_report,
    read_matrix,
)
from moe_edge.papers.moe_prism.refactor.partition.objective import qualities
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    planted_activations,
    split_rows,
)
from moe_edge.papers.moe_prism.refactor.partition.solve import BASELINES
from moe_edge.papers.moe_prism.refactor.run import run_refactor
from moe_edge.papers.moe_prism.refactor.settings import PartitionOptions


@pytest.fixture(scope="module")
def M_TF():
    return planted_activations(200, 32, clusters=4, active=1, seed=1)[0]


def test_split_rows_are_disjoint_and_seeded():
    fit, held = split_rows(100, 0.25, 3)
    assert len(held) == 25 and sorted([*fit, *held]) == list(range(100))
    np.testing.assert_array_equal(split_rows(100, 0.25, 3)[1], held)
    assert not np.array_equal(split_rows(100, 0.25, 4)[1], held)
    assert [len(rows) for rows in split_rows(1, 0.9, 0)] == [1, 0]
    with pytest.raises(ConfigError, match=r"heldout_ratio is 1.0, expected 0 to"):
        split_rows(10, 1.0, 0)


def test_quality_by_hand():
    M_TF = np.array([[1.0, -2.0, 3.0, 0.0], [4.0, 0.0, 0.0, -1.0], [0.0] * 4])
    found = qualities(M_TF, {"by hand": np.array([0, 0, 1, 1])}, 2, 1)["by hand"]
    # Norms are (3, 3) and (4, 1); the tie leaves out sub-expert 0.
    assert found["objective"] == 4.0 and found["share"] == pytest.approx(4 / 11)
    assert found["usage"] == [0.5, 0.5] and found["usage_spread"] == 0


def test_heldout_report_scores_rows_that_were_not_fitted(M_TF):
    report = heldout_report(M_TF, PartitionOptions(seed=2))
    assert (report["rows_fitted"], report["rows_heldout"]) == (160, 40)
    assert set(report["methods"]) == {"alternate", *BASELINES}
    ours = report["methods"]["alternate"]
    for name in BASELINES:
        other = report["methods"][name]
        assert ours["fitted"]["objective"] <= other["fitted"]["objective"]
    assert ours["heldout"]["share"] < report["methods"]["random"]["heldout"]["share"]
    # Held-out rows changed: the fit and its score stay, the held-out score moves.
    changed = M_TF.copy()
    changed[split_rows(200, 0.2, 2)[1]] *= 2
    again = heldout_report(changed, PartitionOptions(seed=2))["methods"]["alternate"]
    assert again["fitted"] == ours["fitted"]
    assert again["heldout"]["objective"] == pytest.approx(
        2 * ours["heldout"]["objective"], rel=1e-5
    )


def test_heldout_report_small_case_has_the_optimum(M_TF):
    methods = heldout_report(M_TF[:, :8], PartitionOptions(sub_experts=2))["methods"]
    optimum = methods["brute_force"]["fitted"]["objective"]
    assert methods["alternate"]["fitted"]["objective"] == pytest.approx(optimum)
    assert all(optimum <= m["fitted"]["objective"] + 1e-3 for m in methods.values())


def test_run_matrix_writes_labels_and_minimises_all_rows(tmp_path, M_TF):
    np.save(tmp_path / "M.npy", M_TF)
    out = tmp_path / "out"
    summary = run_refactor(
        out_dir=str(out), activations=str(tmp_path / "M.npy"), config_text=lambda: "x=1"
    )
    labels = np.load(out / "labels.npy", allow_pickle=False)
    assert np.bincount(labels).tolist() == [8] * 4
    norms = [np.abs(M_TF[:, labels == sub]).sum(1) for sub in range(4)]
    expected = np.sort(norms, axis=0)[:3].sum(dtype=np.float64)
    assert summary["objective"] == pytest.approx(expected, rel=1e-6)
    assert 0 < summary["objective_heldout"] < summary["objective"]
    assert summary["seconds"] > 0
    stored = json.loads((out / "partition.json").read_text("utf-8"))
    assert stored["objective"] == summary["objective"]
    assert stored["all_rows"]["objective"] == pytest.approx(expected, rel=1e-6)
    assert (out / "config.gin").read_text("utf-8") == "x=1"
    again = run_refactor(
        out_dir=str(tmp_path / "again"), activations=str(tmp_path / "M.npy")
    )
    assert again["objective"] == summary["objective"]
    with pytest.raises(OutputError, match="is not empty"):
        run_refactor(out_dir=str(out), activations=str(tmp_path / "M.npy"))


def test_run_matrix_one_token_has_no_heldout(tmp_path):
    np.save(tmp_path / "M.npy", np.arange(8.0)[None])
    summary = run_refactor(
        out_dir=str(tmp_path / "o"),
        activations=str(tmp_path / "M.npy"),
        sub_experts=2,
        inactive=1,
    )
    assert summary["objective_heldout"] is None
    assert summary["objective"] == 0 + 1 + 2 + 3


def test_run_matrix_dry_run_writes_nothing(tmp_path, M_TF):
    np.save(tmp_path / "M.npy", M_TF)
    found = run_refactor(
        out_dir=str(tmp_path / "o"), activations=str(tmp_path / "M.npy"), dry_run=True
    )
    assert found == {
        "dry_run": True,
        "tokens": 200,
        "neurons": 32,
        "out_dir": str(tmp_path / "o"),
    }
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
            "no .npy array of numbers .*allow_pickle=False",
        ),
        (lambda path: path.write_bytes(b"hello"), "no .npy array of numbers"),
        (lambda path: path.write_bytes(b""), "no .npy array of numbers"),
        (lambda path: np.savez(path.open("wb"), a=1), "npz archive"),
        (lambda path: np.save(path, np.array([["a"]])), "activations are <U1"),
        (lambda path: np.save(path, np.ones(3)), r"shape \(3,\)"),
        (lambda path: np.save(path, np.zeros((9, 8))), r"all zero \(9 tokens, 8 neu"),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_read_matrix_rejects_bad_file(tmp_path, make, message):
    path = tmp_path / "M.npy"
    make(path)
    with pytest.raises(ConfigError, match=message):
        read_matrix(path)


def test_run_matrix_rejects_missing_file_and_bad_split(tmp_path, M_TF):
    out = str(tmp_path / "o")
    with pytest.raises(OSError, match=r"nothing\.npy"):
        run_refactor(out_dir=out, activations=str(tmp_path / "nothing.npy"))
    np.save(tmp_path / "M.npy", M_TF)
    with pytest.raises(ConfigError, match="32 neurons .* 5 equal .* 2, 4, 8, 16, 32"):
        run_refactor(out_dir=out, activations=str(tmp_path / "M.npy"), sub_experts=5)
