"""Two runs into one --out_dir, and disks that are full when results are written."""

import errno
import importlib
import json
import os
import subprocess

import pytest

from moe_edge.core.out_folder import taken_folder
from tests.support.serving import COSTS

NEW = 5


@pytest.fixture
def flags(tiny):
    return ["--checkpoint", tiny, "--prompt", "The mill", "--max_new_tokens", NEW]


@pytest.fixture
def other_disk(tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("TMPDIR", str(other))
    return other


def check_kept(done, out, other_disk) -> None:
    """The script failed and named the folder that has its results."""
    (kept,) = other_disk.iterdir()
    assert done.code == 2 and not out.exists()
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: results cannot be written to {out}: ")
    assert "No space left on device" in error and error.endswith(
        f"; they are in {kept}"
    )
    assert (kept / "config.gin").is_file()
    (line,) = (kept / "generations.jsonl").read_text().splitlines()
    assert len(json.loads(line)["tokens"]) == NEW


def test_second_run_is_refused_with_the_process_that_runs(run_script, flags, tmp_path):
    with taken_folder(tmp_path / "o"):
        for more in ((), ("--overwrite",), ("--dry_run",)):
            done = run_script("generate", *flags, "--out_dir", "o", *more)
            assert done.error.startswith(
                f"error: another run (process {os.getpid()}) is writing {tmp_path}/o; "
            )
            assert "The mill" not in done.stdout  # refused before it decodes
    assert run_script("generate", *flags, "--out_dir", "o").code == 0


def fill_disk(monkeypatch, writer: str, start) -> None:
    """Lets a function fail that writes a file whose path starts so."""
    name, _, function = writer.rpartition(".")
    write = getattr(importlib.import_module(name), function)

    def full(path, *given) -> None:
        if str(path).startswith(str(start)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *given)

    monkeypatch.setattr(writer, full)


def test_results_of_a_full_disk_are_kept_elsewhere(
    run_script, flags, tmp_path, other_disk, monkeypatch
):
    """With them the records of the run that lie in the folder; others are in place."""
    fill_disk(
        monkeypatch, "moe_edge.engine.run_generate.write_generations", tmp_path / ".o"
    )
    records = ["--trace", "o/t.csv.gz", "--events", "e.jsonl", "--timeline", "t.json"]
    flags = [*flags, "--device_memory", "50%", *records, "--out_dir", "o"]
    done = run_script("generate", *flags)
    check_kept(done, tmp_path / "o", other_disk)
    assert (next(other_disk.iterdir()) / "t.csv.gz").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.jsonl", "t.json"]


def test_decisions_of_a_load_are_written_where_its_results_are_not(
    run_script, tmp_path, other_disk, monkeypatch
):
    (tmp_path / "costs.json").write_text(json.dumps({"step_costs": COSTS.to_json()}))
    fill_disk(monkeypatch, "moe_edge.loadtest.run_load.write_json", tmp_path / ".o")
    flags = ["--target", "computed", "--costs", "costs.json", "--poisson", 50]
    flags += ["--duration_s", 0.2, "--decisions", "d.jsonl", "--out_dir", "o"]
    done = run_script("load", *flags)
    assert done.code == 2 and "; they are in " in done.stderr
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) > 1


@pytest.fixture
def full_disk(tmp_path):
    """A file system without a free byte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(OSError, match="No space left"):
            with (disk / "fill").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_results_of_a_disk_that_is_full_are_kept_elsewhere(
    run_process, flags, full_disk, other_disk
):
    done = run_process("generate", *flags, "--out_dir", full_disk / "out")
    check_kept(done, full_disk / "out", other_disk)
