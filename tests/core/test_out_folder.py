"""Folders of results: taken first, never half-written, kept elsewhere if need be."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_edge.core.checks import OutputError
from moe_edge.core.folder_lock import check_free
from moe_edge.core.out_folder import (
    KeptElsewhere,
    atomic_folder,
    move_folder,
    taken_folder,
    write_folder,
)
from moe_edge.core.run_folder import RunFolder, root

ROOT = Path(__file__).parents[2]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_folder_success_renames(tmp_path):
    with atomic_folder(tmp_path / "a" / "out") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "x").read_text() == "1"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]


def test_atomic_folder_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("1")
            raise RuntimeError("boom")
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_failure_keeps_old_content(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.gin").write_text("1")
    with pytest.raises(RuntimeError):
        with atomic_folder(tmp_path / "out", overwrite=True):
            raise RuntimeError("boom")
    assert (tmp_path / "out" / "config.gin").exists()


def test_atomic_folder_leftover_of_killed_run_is_replaced(tmp_path):
    leftover = tmp_path / ".out.999999999.partial"
    leftover.mkdir()
    (leftover / "half").write_text("1")
    with atomic_folder(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []
    assert not leftover.exists()


def test_atomic_folder_refuses_a_second_run_at_once(tmp_path):
    with atomic_folder(tmp_path / "out") as first:
        (first / "config.gin").write_text("1")
        for overwrite in (False, True):
            with pytest.raises(
                OutputError, match=f"process {os.getpid()}. is writing .*/out; "
            ):
                with atomic_folder(tmp_path / "out", overwrite):
                    pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.gin").read_text() == "1"


def test_atomic_folder_keeps_what_appeared_meanwhile(tmp_path):
    (tmp_path / "out-2").mkdir()
    message = f"not empty; add .* results of this run are in {tmp_path}/out-3"
    with pytest.raises(KeptElsewhere, match=message):
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("ours")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "config.gin").write_text("theirs")
    assert (tmp_path / "out" / "config.gin").read_text() == "theirs"
    assert (tmp_path / "out-3" / "x").read_text() == "ours"
    assert names_in(tmp_path) == ["out", "out-2", "out-3"]


def test_atomic_folder_overwrites_behind_a_symbolic_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.gin").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link", overwrite=True) as folder:
        (folder / "x").write_text("1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    assert [p.name for p in (tmp_path / "link").iterdir()] == ["x"]


TAKES = """
import sys, time
from moe_edge.core.out_folder import taken_folder

with taken_folder(sys.argv[1]) as partial:
    (partial / "half").write_text("x")
    print("taken", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other_run(tmp_path):
    """A process that has taken `tmp_path/out` and computes."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == b"taken\n"
        yield process
        process.kill()


@root
def run_thing(run: RunFolder, *, computed: list) -> dict:
    """Computes, then writes."""
    if run.dry_run:
        return {}
    computed.append(1)
    run.write(lambda folder: (folder / "x").write_text("1"))
    return {}


def test_second_run_is_refused_before_it_computes(tmp_path, other_run):
    computed, given = [], {"out_dir": tmp_path / "out"}
    message = (
        rf"^another run \(process {other_run.pid}\) is writing {tmp_path}/out; wait for"
    )
    for more in ({}, {"overwrite": True}, {"dry_run": True}):
        with pytest.raises(OutputError, match=message):
            run_thing(computed=computed, **given, **more)
    assert computed == []
    other_run.kill()  # as nobody tidies up after
    other_run.wait()
    assert len(names_in(tmp_path)) == 1
    run_thing(computed=computed, **given)
    assert computed == [1] and names_in(tmp_path) == ["out"]


def test_taken_folder_leaves_nothing_if_nothing_is_written(tmp_path):
    with taken_folder(tmp_path / "a" / "b" / "out"):
        assert names_in(tmp_path / "a" / "b") == [f".out.{os.getpid()}.partial"]
    assert names_in(tmp_path) == []
    with pytest.raises(RuntimeError), taken_folder(tmp_path / "a" / "out"):
        raise RuntimeError
    assert names_in(tmp_path) == []


def test_writing_that_failed_within_a_taken_folder_can_be_repeated(tmp_path):
    with taken_folder(tmp_path / "out"):
        with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "x").write_text("1")
            raise RuntimeError
        with pytest.raises(OutputError, match="is writing"):
            check_free(tmp_path / "out")
        with atomic_folder(tmp_path / "out") as folder:
            assert names_in(folder) == []
            (folder / "config.gin").write_text("2")
        with atomic_folder(tmp_path / "out", overwrite=True):
            pass
    assert names_in(tmp_path) == ["out"] and names_in(tmp_path / "out") == []


@pytest.fixture
def other_disk(tmp_path, monkeypatch):
    """Where results go that cannot be written; the only such place."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("TMPDIR", str(other))
    monkeypatch.setattr(
        "moe_edge.core.out_folder.OTHER_PLACES", (str(tmp_path / "no"),)
    )
    return other


def full_disk(below: Path, tries: list):
    """A writer of two files, for the second of which a disk has no space."""

    def save(folder: Path) -> None:
        tries.append(folder)
        (folder / "first").write_text("1")
        if folder.is_relative_to(below):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "x"))
        (folder / "second").write_text("2")

    return save


def test_results_that_do_not_fit_are_written_elsewhere(tmp_path, other_disk):
    disk, tries = tmp_path / "disk", []
    (disk / "out").mkdir(parents=True)
    (disk / "out" / "config.gin").write_text("old")
    run = RunFolder(disk / "out", overwrite=True, config_text=lambda: "new")
    with pytest.raises(KeptElsewhere) as caught, run.taken():
        run.write(full_disk(disk, tries))
    (kept,) = other_disk.iterdir()
    text = str(caught.value)
    assert text.startswith(f"results cannot be written to {disk}/out: ")
    assert "No space left" in text and text.endswith(f"; they are in {kept}")
    assert caught.value.exit_code != 0
    assert kept.name.startswith("out-") and len(tries) == 2
    assert names_in(kept) == ["config.gin", "first", "second"]
    assert names_in(disk) == ["out"] and names_in(disk / "out") == ["config.gin"]
    assert (disk / "out" / "config.gin").read_text() == "old"


def test_files_of_results_kept_elsewhere_are_written(tmp_path, other_disk):
    """Those in the folder go with it, others are where they were asked for."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run = RunFolder(disk / "out", config_text=lambda: "new")

    def write(path: Path) -> None:
        path.write_text("a trace")

    def fail(path: Path) -> None:
        raise OutputError(f"trace {path} cannot be written")

    apart = {tmp_path / "t": write, tmp_path / "u": fail, tmp_path / "v": write}
    with pytest.raises(OutputError) as caught, run.taken():
        run.write(full_disk(disk, []), {disk / "out" / "sub" / "w": write, **apart})
    (kept,) = other_disk.iterdir()
    assert names_in(kept) == ["config.gin", "first", "second", "sub"]
    assert names_in(tmp_path) == ["disk", "other", "t", "v"] and not names_in(disk)
    written = (kept / "sub" / "w", tmp_path / "t", tmp_path / "v")
    assert {path.read_text() for path in written} == {"a trace"}
    assert str(caught.value).startswith(f"results cannot be written to {disk}/out: ")
    assert f"; they are in {kept}; trace {tmp_path}/u cannot be" in str(caught.value)


def test_a_file_that_does_not_fit_into_the_folder_goes_elsewhere_with_it(
    tmp_path, other_disk
):
    disk = tmp_path / "disk"

    def full(path: Path) -> None:
        if path.is_relative_to(disk):
            raise OutputError(f"trace {path} cannot be written: no space")
        path.write_text("a trace")

    with pytest.raises(KeptElsewhere, match="cannot be written: no space; they are in"):
        RunFolder(disk / "out").write(lambda folder: None, {disk / "out" / "t": full})
    (kept,) = other_disk.iterdir()
    assert names_in(kept) == ["t"] and not disk.exists()


def test_results_that_fit_nowhere_leave_nothing(tmp_path, other_disk):
    message = (
        rf"to {tmp_path}/out: .*No space left on device.*; nor below {other_disk}, "
    )
    with pytest.raises(OutputError, match=message):
        write_folder(tmp_path / "out", full_disk(tmp_path, []))
    assert names_in(tmp_path) == ["other"] and names_in(other_disk) == []


def test_folder_filled_meanwhile_loses_no_results(tmp_path, other_disk):
    computed, out = [], tmp_path / "out"

    class Filling(list):
        def append(self, item) -> None:
            super().append(item)
            out.mkdir()
            (out / "config.gin").write_text("theirs")

    with pytest.raises(KeptElsewhere, match="is not empty; .* they are in "):
        run_thing(out_dir=out, computed=Filling(computed))
    (kept,) = other_disk.iterdir()
    assert names_in(kept) == ["x"] and names_in(out) == ["config.gin"]


def test_wrong_folder_is_refused_and_nothing_is_written_elsewhere(tmp_path, other_disk):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty; add --overwrite") as caught:
        write_folder(tmp_path / "out", full_disk(tmp_path, []))
    assert not isinstance(caught.value, KeptElsewhere)
    assert names_in(other_disk) == []


@pytest.fixture
def made(tmp_path):
    """A complete folder, next to an earlier result."""
    for name in ("made", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    return tmp_path / "made"


def test_a_complete_folder_replaces_an_earlier_result(tmp_path, made):
    run = RunFolder(tmp_path / "out", overwrite=True, config_text=lambda: "settings")
    with run.taken():
        run.move(made)
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == ["config.gin", "manifest.json"]
    assert (tmp_path / "out" / "manifest.json").read_text() == "made"
    move_folder(tmp_path / "out", tmp_path / "again")
    assert names_in(tmp_path) == ["again"]


@pytest.mark.parametrize("fails", ["config.gin", "rename", "filled"])
def test_a_complete_folder_that_cannot_be_moved_stays(
    fails, tmp_path, made, monkeypatch
):
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_, **__):
        raise full

    run = RunFolder(tmp_path / "out", overwrite=True, config_text=lambda: "settings")
    with monkeypatch.context() as patch, run.taken():
        if fails == "filled":
            (tmp_path / "out" / "manifest.json").rename(tmp_path / "out" / "mine.txt")
        elif fails == "config.gin":
            patch.setattr(Path, "write_text", refuse)
        else:
            rename = Path.rename
            patch.setattr(
                Path, "rename", lambda a, b: refuse() if a == made else rename(a, b)
            )
        with pytest.raises((OSError, OutputError), match="No space|no earlier result"):
            run.move(made)
    assert names_in(tmp_path) == ["made", "out"]
    assert (made / "manifest.json").read_text() == "made"
    (kept,) = (tmp_path / "out").iterdir()
    assert kept.read_text() == "out"
