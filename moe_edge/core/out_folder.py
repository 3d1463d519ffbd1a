"""Folders of results: taken before they are computed, never seen half-written.

A folder is built next to its place as `.NAME.PID.partial`, locked, and renamed when
complete; what a killed process left is removed by the next run.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_edge.core import folder_lock
from moe_edge.core.checks import OutputError
from moe_edge.core.files import check_out_dir

OTHER_PLACES = ("/var/tmp", "~", ".", "/dev/shm")  # on other disks, perhaps

_taken: dict[Path, Path] = {}  # folder -> its temporary one, which nobody writes yet


class KeptElsewhere(OutputError):
    """Results that are complete, in another folder than the one asked for."""


@contextlib.contextmanager
def taken_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Keeps other runs out of an output folder from before its results are computed.

    Within, `atomic_folder` of the same path is this process's. At the end nothing is
    left of a folder that was taken and not written.

    Yields:
      The temporary folder next to it.
    Raises:
      OutputError: see `check_out_dir`; or another run that is alive has taken it.
    """
    path = check_out_dir(path, overwrite)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    made = [folder for folder in path.parents if not folder.exists()]
    with contextlib.ExitStack() as at_end:
        at_end.callback(_remove_empty, made)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with folder_lock.held(path.parent):
                folder_lock.remove_leftovers(path)
                partial.mkdir()
                at_end.callback(shutil.rmtree, partial, ignore_errors=True)
                at_end.enter_context(folder_lock.held(partial))
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"output folder {path} cannot be written: {error}"
            ) from error
        _taken[path] = partial
        at_end.callback(_taken.pop, path, None)
        yield partial


@contextlib.contextmanager
def atomic_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` when the block succeeds.

    On an exception what was written is removed and `path` is left as it was.

    Raises:
      OutputError: see `check_out_dir`, which is asked again at the end; or another run
        is writing `path`. KeptElsewhere: what was written could not become `path`.
    """
    path = check_out_dir(path, overwrite)
    with contextlib.ExitStack() as at_end:
        if path not in _taken:
            at_end.enter_context(taken_folder(path, overwrite))
        partial = _taken.pop(path)
        try:
            yield partial
            _publish(partial, path, overwrite)
        except BaseException:
            for entry in partial.iterdir() if partial.is_dir() else ():
                _remove(entry)
            _taken[path] = partial
            raise


def _publish(partial: Path, path: Path, overwrite: bool) -> None:
    """Makes a complete temporary folder `path`, or keeps it under another name."""
    try:
        _replace(path, partial, partial.with_suffix(".old"), overwrite)
    except (OSError, OutputError) as error:
        names = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
        kept = next(name for name in names if not name.exists())
        partial.rename(kept)
        raise KeptElsewhere(
            f"{error}; the results of this run are in {kept}"
        ) from error


def _replace(path: Path, new: Path, old: Path, overwrite: bool) -> None:
    """Renames a folder to `path`; `old` is what `path` is called meanwhile."""
    with folder_lock.held(path.parent):
        check_out_dir(path, overwrite)  # it may have been filled meanwhile
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    shutil.rmtree(old, ignore_errors=True)


def move_folder(made: Path, path: str | Path, overwrite: bool = False) -> None:
    """Renames a complete folder next to an output folder to that.

    On an exception both stay as they were, so that nothing is lost.

    Raises:
      OSError: it cannot be renamed. OutputError: see `atomic_folder`.
    """
    path = check_out_dir(path, overwrite)
    with contextlib.ExitStack() as at_end:
        if path not in _taken:
            at_end.enter_context(taken_folder(path, overwrite))
        _replace(path, made, _taken[path].with_suffix(".old"), overwrite)


def write_folder(
    path: str | Path, save: Callable[[Path], None], overwrite: bool = False
) -> None:
    """Writes results that took time to compute; if that fails, into another folder.

    Args:
      save: writes into a folder; called again where it failed, as on a full disk.
    Raises:
      OutputError: names the folder that has the results instead.
    """
    path = Path(path).resolve()
    with contextlib.ExitStack() as at_end:
        if path not in _taken:
            at_end.enter_context(taken_folder(path, overwrite))
        try:
            with atomic_folder(path, overwrite) as folder:
                save(folder)
        except KeptElsewhere:
            raise
        except (OSError, OutputError) as error:
            _save_elsewhere(path, save, error)


def _save_elsewhere(path: Path, save: Callable[[Path], None], error: Exception) -> None:
    """Raises OutputError, after results that could not become `path` were written."""
    failed = f"results cannot be written to {path}: {error}"
    bases = [os.environ.get("TMPDIR", "/tmp"), *OTHER_PLACES]
    for base in map(os.path.expanduser, bases):
        if (kept := _saved_below(base, path.name, save)) is not None:
            raise KeptElsewhere(f"{failed}; they are in {kept}") from error
    raise OutputError(f"{failed}; nor below {', '.join(bases)}") from error


def _saved_below(base: str, name: str, save: Callable[[Path], None]) -> Path | None:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base)).resolve()
        save(folder)
        return folder
    except (OSError, OutputError):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return None


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # one is not empty, or was never made
        for folder in folders:
            folder.rmdir()
