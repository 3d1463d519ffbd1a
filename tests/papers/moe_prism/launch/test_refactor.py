import numpy as np


def test_one_matrix(run_script, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "m.npy", rng.standard_normal((40, 8)).astype(np.float32))
    arguments = ("--activations", tmp_path / "m.npy", "--out_dir", tmp_path / "out")
    done = run_script("refactor", *arguments, "--sub_experts", 2, "--inactive", 1)
    assert done.summary["objective"] > 0 and done.summary["seconds"] >= 0
    labels = np.load(tmp_path / "out" / "labels.npy")
    assert np.bincount(labels).tolist() == [4, 4]
    again = run_script("refactor", *arguments, "--sub_experts", 3)
    assert "is not empty" in again.error


def test_missing_profile_is_one_line(run_script, tiny, tmp_path):
    done = run_script("refactor", "--checkpoint", tiny, "--out_dir", tmp_path / "out")
    assert "no --profile; a model with --gate lg needs" in done.error
