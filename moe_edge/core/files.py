"""Writing folders so that nothing half-written is ever seen.

A folder is built under a temporary sibling name and renamed when complete; a
leftover of an interrupted run is removed by the next one.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_edge.core.checks import OutputError


def check_out_dir(path: str | Path, overwrite: bool) -> Path:
    """Returns `path` if a result may be written there.

    Raises:
      OutputError: it is a file, a non-empty folder without `overwrite`, or its
        parent cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise OutputError(f"output folder {path} is a file; name another --out_dir")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise OutputError(
            f"output folder {path} is not empty; add --overwrite or name another"
        )
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise OutputError(
            f"output folder {path} cannot be written: no access to {parent}"
        )
    return path


@contextlib.contextmanager
def atomic_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` when the block succeeds.

    On an exception the temporary folder is removed and `path` is left as it was.
    """
    path = check_out_dir(path, overwrite)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise OutputError(f"output folder {path} cannot be written: {error}") from error
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


def write_text(path: str | Path, text: str) -> None:
    """Writes a file under a temporary name, then renames it."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
