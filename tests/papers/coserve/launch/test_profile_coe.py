"""launch/profile_coe.py as a user runs it, on a tiny board."""

import pytest

from moe_edge.papers.coserve.coe.profile import read_profile
from tests.papers.coserve.support.coe_boards import write_board

SHORT = ("--most_batch", 1, "--repeats", 1)


def test_profile_coe_writes_what_coserve_reads(run_script, tmp_path):
    write_board(tmp_path / "w")
    flags = ["--graph", "w/coe.json", "--kinds", "gpu,cpu", "--set", "*.*.disk_s=0.5"]
    done = run_script("profile_coe", *flags, *SHORT, "--out_dir", "p")
    assert list(done.summary) == ["devices", "out_dir"]
    devices = read_profile(tmp_path / "p" / "coe_profile.json")
    assert list(devices) == ["gpu", "cpu"]
    for each in devices.values():
        assert list(each) == ["board_resnet", "board_detector"]
        for costs in each.values():
            assert costs.load_s["disk"] == 0.5 != costs.load_s["host"]
    assert "board_resnet: n images take" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--graph", "nowhere.json"], "nowhere.json"),
        (["--graph", "w/coe.json", "--kinds", "gpu,gpu"], "kinds is 'gpu,gpu', exp"),
        (["--graph", "w/coe.json", "--set", "a.b"], "set is 'a.b', expected such as"),
        (["--graph", "w/coe.json", "--most_batch", 0], "most_batch must be a pos"),
    ],
)
def test_profile_coe_refuses_bad_input(flags, message, run_script, tmp_path):
    write_board(tmp_path / "w")
    done = run_script("profile_coe", *flags, "--out_dir", "p")
    assert message in done.error


def test_profile_coe_names_weights_that_are_wrong(run_script, tmp_path):
    write_board(tmp_path / "w")
    (tmp_path / "w/experts/classifier_1.bin").write_bytes(b"short")
    done = run_script("profile_coe", "--graph", "w/coe.json", "--out_dir", "p")
    assert "classifier_1" in done.error and "5 bytes, expected" in done.error
