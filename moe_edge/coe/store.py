"""The experts' files: one flat record each, memory-mapped, checked at the start."""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.coe.models import get_network
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.workload.coe_graph import CoeGraph

SHOWN = 20  # experts in the message about wrong files; it stays one line
CAN_FORGET = hasattr(os, "posix_fadvise")
_CHUNK_BYTES = 1 << 20
Stamp = tuple[int, int, int]  # of a file: another one, or a changed one, has another


class ExpertStore:
    """Records of a graph's experts in files, read-only.

    Args:
      graph: whose experts all have a file.
      folder: of its `coe.json`; files are relative to it.
    Raises:
      ConfigError: an expert without a file, or an architecture whose record is not
        that of its network.
    """

    def __init__(self, graph: CoeGraph, folder: str | Path):
        for name, architecture in graph.architectures.items():
            try:
                get_network(architecture)
            except ConfigError as error:
                raise ConfigError(f"architecture {name!r}: {error}") from error
        without = [e.id for e in graph.experts if e.file is None or e.sha256 is None]
        if without:
            raise ConfigError(
                f"{_some(without)} of {len(graph.experts)} experts have no file or "
                "sha256, so they can be simulated only"
            )
        self.graph, self.folder = graph, Path(folder)
        self._stamps: dict[int, Stamp] = {}  # of files that were found right

    def path(self, expert: int) -> Path:
        """Of its file."""
        return self.folder / self.graph.experts[expert].file

    def record_bytes(self, expert: int) -> int:
        """Of its record."""
        of = self.graph.experts[expert].architecture
        return self.graph.architectures[of].record_bytes

    def check(self) -> None:
        """Reads all files once; later changes are noticed by `record`.

        Raises:
          CheckpointError: files that are missing, of a wrong size or have another
            sha256: which, of many the first ones and how many.
        """
        wrong = []
        for number, expert in enumerate(self.graph.experts):
            reason = self._wrong(number, expert.sha256)
            if reason is not None:
                wrong.append(f"{expert.id} ({self.path(number)}: {reason})")
        if wrong:
            raise CheckpointError(
                f"weights of {_some(wrong)} of {len(self.graph.experts)} experts are "
                "not as the graph says; copy or train them again"
            )

    def record(self, expert: int) -> np.ndarray:
        """A view of a record, uint8 [record_bytes], mapped anew: nothing is read yet.

        A file must not be cut while its view is in use: the system then ends the
        process. Writing under another name and renaming is safe.

        Raises:
          CheckpointError: the file is gone, of another size, or was written again since
            it was checked.
        """
        path, size = self.path(expert), self.record_bytes(expert)
        try:
            there = os.stat(path)
            reason = f"has {there.st_size} bytes, expected {size}"
            if there.st_size == size:
                if self._stamps.get(expert) in (None, _stamp(there)):
                    return np.memmap(path, np.uint8, "r")
                reason = "has changed since it was checked"
        except (OSError, ValueError) as error:  # ValueError: no path can be so
            reason = f"cannot be read: {_said(error)}"
        name = self.graph.experts[expert].id
        raise CheckpointError(f"weights of expert {name!r}: {path} {reason}")

    def forget(self, expert: int) -> None:
        """Asks the system to drop a record from its cache, if it can be asked; `record`
        says what is wrong with a file."""
        with contextlib.suppress(OSError):
            forget(self.path(expert))

    def _wrong(self, expert: int, sha256: str) -> str | None:
        try:
            there = os.stat(self.path(expert))
            if there.st_size != self.record_bytes(expert):
                return f"{there.st_size} bytes, expected {self.record_bytes(expert)}"
            found = file_sha256(self.path(expert))
        except (OSError, ValueError) as error:
            return _said(error)
        if found != sha256:
            return f"sha256 {found[:12]}, expected {sha256[:12]}"
        self._stamps[expert] = _stamp(there)
        return None


def write_experts(
    folder: str | Path, records: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Writes records, each under a temporary name first; returns the sha256 of each.

    Args:
      records: file, relative to the folder, -> uint8 [record_bytes].
    """
    found = {}
    for file, record_B in records.items():
        path = Path(folder) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(memoryview(record_B))
        partial.rename(path)
        found[file] = hashlib.sha256(memoryview(record_B)).hexdigest()
    return found


def file_sha256(path: str | Path) -> str:
    """Of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def forget(path: Path) -> None:
    """Asks the system to drop a file from its cache, if it can be asked."""
    if CAN_FORGET:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _stamp(file: os.stat_result) -> Stamp:
    return file.st_size, file.st_mtime_ns, file.st_ino


def _said(error: OSError | ValueError) -> str:
    """Why a file cannot be read, without its path."""
    return getattr(error, "strerror", None) or str(error)


def _some(names: Sequence[str]) -> str:
    """The first ones, and how many there are."""
    more = "" if len(names) <= SHOWN else f", .. ({len(names)} in all)"
    return ", ".join(names[:SHOWN]) + more
