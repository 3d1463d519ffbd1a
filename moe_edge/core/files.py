"""Checks of paths that are read and written, work folders, and whole small files."""

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core import folder_lock
from moe_edge.core.checks import OutputError, RequestError

# One of these in a folder says that it is an output of ours (or a checkpoint).
MARKERS = (
    *("manifest.json", "config.json", "config.gin", "result.json"),
    *("generations.jsonl", "evaluation.json"),
)


def check_out_dir(path: str | Path, overwrite: bool) -> Path:
    """Returns `path`, resolved, if a result may be written there.

    Raises:
      OutputError: it is a file, holds the working directory, is a non-empty folder
        without `overwrite` or with foreign files, or its parent cannot be written.
    """
    path = Path(path).resolve()
    if Path.cwd().is_relative_to(path):
        raise OutputError(
            f"output folder {path} is or holds the working directory; name another"
        )
    if path.exists() and not path.is_dir():
        raise OutputError(f"output folder {path} is a file; name another --out_dir")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise OutputError(
            f"output folder {path} is not empty; add --overwrite or name another"
        )
    if path.is_dir() and any(path.iterdir()):
        if not any((path / name).is_file() for name in MARKERS):
            raise OutputError(
                f"output folder {path} holds none of {', '.join(MARKERS)}, so it is "
                "no earlier result; empty it yourself or name another"
            )
    _check_writable(path, path.parent)
    return path


def _check_writable(path: Path, there: Path) -> None:
    """Raises OutputError if `path` cannot be written in `there`, or the folder above
    that there is."""
    while not there.exists():
        there = there.parent
    try:  # os.access says yes to the administrator, also where nobody may write
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OutputError(
            f"output folder {path} cannot be written: no access to {there} "
            f"({error.strerror}); name another --out_dir"
        ) from error


def check_work_folder(path: str | Path) -> None:
    """Checks that `locked_folder` would make or lock a folder; writes nothing.

    Raises:
      OutputError: it is a file, cannot be written, or another run holds it.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise OutputError(f"output folder {path} is a file; name another --out_dir")
    _check_writable(path, path)
    if (path / ".lock").exists() and folder_lock.is_held(path / ".lock"):
        raise folder_lock.refusal(path, folder_lock.read_pid(path))


def check_apart(out_dir: str | Path, *inputs: str | Path) -> None:
    """Checks that writing `out_dir` leaves what is read from alone.

    Raises:
      OutputError: the folder is an input, holds one or lies inside one.
    """
    out_dir = Path(out_dir).resolve()
    for given in inputs:
        source = Path(given).resolve()
        if out_dir.is_relative_to(source) or source.is_relative_to(out_dir):
            raise OutputError(
                f"output folder {out_dir} overlaps the source {source}; name another"
            )


def check_there(path: str | Path, flag: str, mend: str = "check the path") -> None:
    """Checks that a file which will be read is there.

    Args:
      flag: gave the path, for the message.
      mend: how to fix a path where nothing is.
    Raises:
      FileNotFoundError, IsADirectoryError: it is not there, or a folder.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{flag} {path} does not exist; {mend}".lstrip())
    if Path(path).is_dir():
        raise IsADirectoryError(
            f"{flag} {path} is a folder, expected a file; name a file in it".lstrip()
        )


def decode_utf8(
    where: str | Path,
    raw: bytes,
    error: Callable[[str], Exception] = RequestError,
    first: int = 0,
) -> str:
    """The text of some bytes of a file, the first of which is number `first`.

    Raises:
      `error`: they are not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(
            f"{where} is not UTF-8 text: byte {first + fault.start} is "
            f"0x{raw[fault.start]:02x}; save it as UTF-8"
        ) from fault


def check_out_file(path: str | Path, out_dir: str | Path | None = None) -> None:
    """Checks, before a run, that a file can be written at its end.

    Args:
      path: of the file; one that is there will be replaced.
      out_dir: the run's folder, which will be there by then; None: there is none.
    Raises:
      OutputError: the file is a folder, or its folder is missing or cannot be written.
    """
    path = Path(path)
    if out_dir is not None and path.parent.resolve() == Path(out_dir).resolve():
        return
    if path.is_dir():
        raise OutputError(f"output file {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(
            f"output file {path}: folder {path.parent} does not exist; make it first"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"output file {path} cannot be written: no access to {path.parent}"
        )


def check_room(folder: str | Path, num_bytes: int) -> None:
    """Raises OSError if fewer bytes are free at a folder."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        reason = f"{os.strerror(errno.ENOSPC)}: {num_bytes} bytes to write, {free} free"
        raise OSError(errno.ENOSPC, reason, str(folder))


@contextlib.contextmanager
def locked_folder(folder: str | Path, what: str) -> Iterator[Path]:
    """Makes a work folder from which a stopped run goes on; keeps a second process out.

    The lock is the process's: it goes with it, however it ends. The file `.lock` stays.
    A run that is stopped by a signal says on stderr where its work is kept.

    Args:
      what: is written there, for the message, such as an output folder.
    Raises:
      OutputError: the folder cannot be made, or another run holds it.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise OutputError(f"work folder {folder} cannot be made: {error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.fstat(lock).st_nlink > 0  # or removed by the run that ended
        except BlockingIOError:
            free = False
        if not free:
            raise folder_lock.refusal(what, folder_lock.read_pid(folder))
        os.truncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        yield folder
    except KeyboardInterrupt:
        print(f"unfinished work is kept in {folder}", file=sys.stderr, flush=True)
        raise
    finally:
        os.close(lock)


def plain_numbers(array: np.ndarray, digits: int = 6) -> list:
    """Nested lists for JSON: null where there is no number, rounded elsewhere."""
    if array.ndim > 1:
        return [plain_numbers(row, digits) for row in array]
    return [None if math.isnan(x) else round(x, digits) for x in array.tolist()]


def write_json(path: str | Path, value: Any, **options) -> None:
    """Writes a value as indented JSON without NaN; `options` are of `json.dumps`."""
    text = json.dumps(value, indent=1, allow_nan=False, **options)
    Path(path).write_text(text + "\n", encoding="utf-8")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file under a temporary name, then renames it."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
