"""Suite `refactor` on tiny sizes: its rows, and the file it reads."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import CapacityError
from moe_edge.papers.moe_prism.studies import speed as refactor

TINY = refactor.RefactorSettings(
    repeats=1, tokens=300, neurons=64, layers=2, experts=2, steps=400, numpy_steps=100
)


@pytest.mark.slow
def test_refactor_suite_rows_and_model(tmp_path):
    rows = refactor.refactor_rows(TINY, tmp_path)
    peers = [row["peer_name"] for row in rows]
    assert sum("NumPy annealing, 400 steps" in name for name in peers) == 2
    assert all(row["ratio"] > 0 and np.isfinite(row["ratio"]) for row in rows)
    (model,) = [row for row in rows if "2 x 2 x 64 x 300" in row["case"]][:1]
    assert model["experts"] == 4 and model["seconds"] < 60
    assert model["shares"]["partition"] < model["shares"]["random"]
    quality = [row for row in rows if "objective in its time" in row["case"]]
    # 400 steps from the greedy start are far from what one batch of descents finds.
    assert all(row["ratio"] < 1 for row in quality) and len(quality) == 2
    assert 1e7 < rows[-1]["runs"]["ours"][0] * 1e6 < 2e9


def test_write_activations_is_kept_and_refuses_a_small_disk(tmp_path, monkeypatch):
    path = refactor.write_activations(tmp_path, TINY)
    stored = np.load(path, allow_pickle=False)
    assert stored.shape == (2, 2, 300, 64) and stored.dtype == np.float16
    last, _ = refactor.planted_activations(300, 64, seed=3)
    np.testing.assert_array_equal(stored[1, 1], last.astype(np.float16))
    stamp = path.stat().st_mtime_ns
    assert refactor.write_activations(tmp_path, TINY).stat().st_mtime_ns == stamp
    usage = refactor.shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr(refactor.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"take 4\.3 GB, .* has 0\.0 GB free"):
        refactor.write_activations(tmp_path, refactor.RefactorSettings())


def test_time_to_target_is_that_of_the_first_batch_below():
    M_TF, _ = refactor.planted_activations(300, 64)
    problem = refactor.build_problem(M_TF, 4, 2)
    seconds, batch_s, reached = refactor._time_to(problem, problem.unit * 1e9, 0)
    assert reached and 0 < seconds <= batch_s * 1.01
    # Out of reach: a finite lower bound, said to be one.
    seconds, batch_s, reached = refactor._time_to(problem, 0.0, 0, max_batches=2)
    assert not reached and seconds == pytest.approx(2 * batch_s)


def test_rows_say_how_often_the_target_was_not_reached(monkeypatch):
    figures = dict.fromkeys(
        ("jitted_s", "numpy_s", "annealed", "ours_s", "same_time", "same_time_s"), 1.0
    )
    rounds = [figures | {"reached": seed != 1} for seed in range(3)]
    monkeypatch.setattr(refactor, "_expert_round", lambda i, s, seed: rounds[seed])
    rows = refactor.expert_rows(2, dataclasses.replace(TINY, repeats=3))
    assert [row.get("not_reached") for row in rows] == [1, 1, None]


@pytest.mark.slow
def test_failed_child_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(refactor, "write_activations", lambda *args: tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="No such file.*gone"):
        refactor.model_rows(tmp_path, TINY)
