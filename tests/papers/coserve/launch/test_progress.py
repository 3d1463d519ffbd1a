"""CoServe's commands report what they do."""

from tests.launch.test_progress import opened
from tests.papers.coserve.launch.test_coserve import write_case, write_live

__all__ = ["opened"]  # a fixture


def test_coserve_reports_every_policy(run_script, tmp_path, opened):  # noqa: F811
    files = write_case(tmp_path)
    machine = ["--simulate", "profile.json", "--executors", "gpu:2,cpu:1"]
    flags = [*files, *machine, "--memory", "0.8KB,0.4KB", "--policies", "coserve"]
    assert run_script("coserve", *flags, "--out_dir", "r").code == 0
    whole = "Serves the same requests by every policy, and compares"
    assert {"serving by coserve", whole} <= set(opened)


def test_profile_coe_reports_compiling_and_rounds(run_script, tmp_path, opened):  # noqa: F811
    write_live(tmp_path, 1)
    flags = ["--graph", "coe.json", "--kinds", "cpu", "--most_batch", 2]
    assert run_script("profile_coe", *flags, "--repeats", 2, "--out_dir", "o").code == 0
    assert {"compiling sizes of batches", "rounds timed"} <= set(opened)
