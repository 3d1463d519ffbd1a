"""Where tests keep compiled programs between runs, and how that folder stays small."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

MAX_BYTES = 1 << 30
UNUSED_S = 30 * 24 * 3600  # a folder of another JAX that nobody used for a month


def cache_folder() -> Path:
    """The folder for this JAX on this kind of processor; made if it is missing.

    A compiled program holds instructions of the processor it was made on, so a home
    folder that several machines share gets one folder for each kind.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"jax-{version('jax')}-{version('jaxlib')}-{_processor()}"
    folder = Path(root) / "moe_edge-tests" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prune(folder: Path, *, now_s: float, max_bytes: int = MAX_BYTES) -> None:
    """Deletes what was not used for longest until half of `max_bytes` is left.

    Nothing is deleted below `max_bytes`. Workers may prune at once: a file that
    another one has deleted is skipped, and a program deleted under a running test is
    compiled again.
    """
    files = _files(folder)
    size = sum(stat.st_size for _, stat in files)
    if size > max_bytes:
        for path, stat in sorted(files, key=lambda item: _used_s(item[1])):
            if size <= max_bytes // 2:
                break
            path.unlink(missing_ok=True)
            size -= stat.st_size
    for other in folder.parent.iterdir():
        if other != folder and other.is_dir():
            for path, stat in _files(other):
                if now_s - _used_s(stat) > UNUSED_S:
                    path.unlink(missing_ok=True)


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The plain files below a folder; one that disappears meanwhile is left out."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):  # programs of another kind
                found += _files(Path(entry.path))
                continue
            try:
                if entry.is_file(follow_symlinks=False):
                    found.append((Path(entry.path), entry.stat()))
            except FileNotFoundError:
                continue
    return found


def _used_s(stat: os.stat_result) -> float:
    """When a file was last read or written (reading is noted about once a day)."""
    return max(stat.st_atime, stat.st_mtime)


def _processor() -> str:
    """A short name of the instruction set, the same on machines of one kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"
