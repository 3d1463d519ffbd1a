"""launch/train_board.py as a user runs it."""

import os

import pytest

from moe_edge.core.files import locked_folder


def test_train_board_dry_run_writes_nothing(run_script, tmp_path):
    done = run_script("train_board", "--types", 40, "--dry_run", "--out_dir", "W")
    assert done.summary == {"dry_run": True, "types": 40, "out_dir": "W"}
    assert not (tmp_path / "W").exists()


def test_train_board_dry_run_checks_the_folder(run_script, tmp_path):
    (tmp_path / "file").touch()
    dry = ("train_board", "--types", 1, "--dry_run", "--out_dir")
    assert "file is a file; name another --out_dir" in run_script(*dry, "file").error
    assert "cannot be written: no access to" in run_script(*dry, "file/W").error
    with locked_folder(tmp_path / "W", "W"):
        taken = f"another run (process {os.getpid()}) is writing {tmp_path / 'W'}; wait"
        assert taken in run_script(*dry, "W").error
    assert run_script(*dry, "W").summary["dry_run"]  # a run would go on there


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--types", 0], "types must be a positive whole number, got 0"),
        (["--types", 3, "--trained_types", 5], "trained_types is 5 of 3 types"),
        (["--compare", "wide"], "unknown network to compare with 'wide'; known: si"),
        (["--learning_rate", -1], "learning_rate must be positive, got -1"),
    ],
)
def test_train_board_refuses_bad_input(flags, message, run_script):
    done = run_script("train_board", *flags, "--out_dir", "W")
    assert message in done.error


def test_train_board_tells_what_interfaces_say(run_script, tmp_path):
    few = ["--types", 1, "--width", 4, "--steps", 2, "--batch", 16]
    done = run_script("train_board", *few, "--out_dir", "W")
    keys = ["types", "trained", "seconds", "accuracy_mean", "accuracy_min", "out_dir"]
    assert list(done.summary) == keys and done.summary["trained"] == 1
    assert (tmp_path / "W/config.gin").is_file()
    assert (tmp_path / "W/coe.json").is_file()
