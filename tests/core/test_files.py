import errno
import os
import tempfile

import pytest

from moe_edge.core.checks import OutputError
from moe_edge.core.files import (
    check_apart,
    check_out_dir,
    check_out_file,
    locked_folder,
    write_text,
)


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
        with pytest.raises(
            OutputError, match=f"another run .process {os.getpid()}. is writing out"
        ):
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
