"""launch/benchmark.py, an alias of the studies benchmark_SUITE."""


def test_suite_is_the_study_of_its_name(run_script):
    done = run_script("benchmark", "--suite", "convert", "--dry_run", "--out_dir", "o")
    kernels = done.summary["kernels"]
    assert kernels.startswith(("native, ", "XLA"))
    assert done.summary == {
        "kernels": kernels,
        "dry_run": True,
        "name": "benchmark_convert",
        "out_dir": "o",
    }


def test_script_bad_suite_ends_in_one_line(run_script):
    assert run_script("benchmark", "--suite=nope").error.startswith(
        "error: unknown suite 'nope'; known: cluster, convert, coserve"
    )


def test_script_without_suite_lists_the_suites_and_runs_none(run_script):
    assert run_script("benchmark", "--dry_run").error.startswith(
        "error: name a suite with --suite: cluster, convert, coserve, decode, "
    )
