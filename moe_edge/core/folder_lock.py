"""Which run writes a folder: locks that end with their process, however it ends.

A run that writes `out` holds the lock of `.out.PID.partial` next to it.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_edge.core.checks import OutputError


@contextlib.contextmanager
def held(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Holds the lock of a folder or file."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether a process that is alive holds the lock of a folder or file."""
    try:
        with held(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:  # it was removed meanwhile
        return False


def refusal(what: str | Path, pid: int | str | None) -> OutputError:
    """The error of a second run.

    Args:
      what: is written, such as an output folder.
      pid: of the process that writes it, if that is known.
    """
    who = f"another run (process {pid})" if pid else "another run"
    return OutputError(
        f"{who} is writing {what}; wait for it, end it, or name another --out_dir"
    )


def read_pid(folder: Path) -> str:
    """Which process holds a work folder, as its lock file says."""
    text = (folder / ".lock").read_text("ascii", errors="replace").strip()
    return text if text.isdigit() else ""


def partials(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields (folder, process, `partial` or `old`) of the temporary ones of `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.(partial|old)")
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        if match := pattern.fullmatch(entry.name):
            yield entry, *match.groups()


def check_free(path: Path) -> None:
    """Raises OutputError if a run that is alive is writing `path`; changes nothing."""
    for entry, pid, kind in partials(path):
        if kind == "partial" and is_held(entry):
            raise refusal(path, pid)


def remove_leftovers(path: Path) -> None:
    """Removes what runs that were killed left of `path`.

    Raises:
      OutputError: a run that is alive is writing it.
    """
    check_free(path)
    for entry, _, kind in partials(path):
        if kind == "old" and not path.exists():
            entry.rename(path)  # killed between the two renames
        else:
            shutil.rmtree(entry, ignore_errors=True)
