import errno
import tempfile

import pytest

from moe_edge.core.checks import OutputError
from moe_edge.core.files import (
    atomic_folder,
    check_apart,
    check_out_dir,
    check_out_file,
    locked_folder,
    write_text,
)


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
            with pytest.raises(OutputError, match="another run is writing .*/out; "):
                with atomic_folder(tmp_path / "out", overwrite):
                    pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.gin").read_text() == "1"


def test_atomic_folder_keeps_what_appeared_meanwhile(tmp_path):
    with pytest.raises(OutputError, match="is not empty; add --overwrite"):
        with atomic_folder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "config.gin").write_text("theirs")
    assert (tmp_path / "out" / "config.gin").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_atomic_folder_overwrites_behind_a_symbolic_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.gin").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link", overwrite=True) as folder:
        (folder / "x").write_text("1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    assert [p.name for p in (tmp_path / "link").iterdir()] == ["x"]


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_check_out_dir_rejects_working_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is or holds the working directory"):
        check_out_dir(name, overwrite=True)


def test_check_out_dir_overwrites_only_results(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="no earlier result"):
        check_out_dir(tmp_path, overwrite=True)


def test_check_out_dir_rejects_non_empty(tmp_path):
    (tmp_path / "config.gin").write_text("1")
    with pytest.raises(OutputError, match="is not empty; add --overwrite"):
        check_out_dir(tmp_path, overwrite=False)
    assert check_out_dir(tmp_path, overwrite=True) == tmp_path


def test_check_out_dir_rejects_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("1")
    with pytest.raises(OutputError, match="is a file"):
        check_out_dir(path, overwrite=True)
    with pytest.raises(OutputError, match="cannot be written"):
        check_out_dir(path / "below", overwrite=True)


def test_check_apart_refuses_the_input_itself_above_and_below(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to("source")
    check_apart(tmp_path / "source2", source)
    for out in (source, tmp_path / "link", source / "out", tmp_path):
        with pytest.raises(OutputError, match="overlaps the source .*/source"):
            check_apart(out, tmp_path.parent / "other", source)
    (source / "x.npy").touch()
    with pytest.raises(OutputError, match="overlaps the source .*/x.npy"):
        check_apart(source, source / "x.npy")


def test_check_out_dir_rejects_unwritable_and_names_the_flag(tmp_path, monkeypatch):
    def refuse(dir):  # tests may run as root, whom no permission stops
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    text = (
        rf"written: no access to {tmp_path} \(Permission denied\); name another --out"
    )
    with pytest.raises(OutputError, match=text):
        check_out_dir(tmp_path / "out", overwrite=False)


def test_write_text_leaves_no_partial(tmp_path):
    write_text(tmp_path / "a.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_locked_folder_keeps_a_second_run_out_and_frees_after_the_first(tmp_path):
    with locked_folder(tmp_path / "w", "out"):
        with pytest.raises(OutputError, match="another run is writing out; wait"):
            with locked_folder(tmp_path / "w", "out"):
                pass
    with locked_folder(tmp_path / "w", "out") as folder:
        assert folder.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made"):
        with locked_folder(tmp_path / "file", "out"):
            pass


def test_check_out_file_refuses_what_cannot_be_written_at_the_end(tmp_path):
    check_out_file(tmp_path / "t.csv.gz", tmp_path / "o")
    check_out_file(tmp_path / "o" / "t.csv.gz", tmp_path / "o")  # will be there
    with pytest.raises(OutputError, match="folder .*no does not exist; make it first"):
        check_out_file(tmp_path / "no" / "t.csv.gz", tmp_path / "o")
    with pytest.raises(OutputError, match="is a folder; name a file in it"):
        check_out_file(tmp_path, tmp_path / "o")
