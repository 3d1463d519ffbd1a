"""The experts' files: one flat record each, memory-mapped, checked at the start."""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.papers.coserve.coe.models import get_network
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_weights import (
    Stamp,
    check_weights,
    said,
    some,
    stamp,
)

CAN_FORGET = hasattr(os, "posix_fadvise")


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
                f"{some(without)} of {len(graph.experts)} experts have no file or "
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
        self._stamps = check_weights(self.graph, self.folder)

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
                if self._stamps.get(expert) in (None, stamp(there)):
                    return np.memmap(path, np.uint8, "r")
                reason = "has changed since it was checked"
        except (OSError, ValueError) as error:  # ValueError: no path can be so
            reason = f"cannot be read: {said(error)}"
        name = self.graph.experts[expert].id
        raise CheckpointError(f"weights of expert {name!r}: {path} {reason}")

    def forget(self, expert: int) -> None:
        """Asks the system to drop a record from its cache, if it can be asked; `record`
        says what is wrong with a file."""
        with contextlib.suppress(OSError):
            forget(self.path(expert))


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


def forget(path: Path) -> None:
    """Asks the system to drop a file from its cache, if it can be asked."""
    if CAN_FORGET:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
