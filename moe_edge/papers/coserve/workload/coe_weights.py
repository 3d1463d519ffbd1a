"""Files of a graph's experts, held against the sizes and hashes that the graph says."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from moe_edge.core.checks import CheckpointError
from moe_edge.core.progress import progress
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph

SHOWN = 20  # experts in the message about wrong files; it stays one line
_CHUNK_BYTES = 1 << 20
Stamp = tuple[int, int, int]  # of a file: another one, or a changed one, has another


def check_weights(
    graph: CoeGraph, folder: str | Path, absent_ok: bool = False
) -> dict[int, Stamp]:
    """Reads the files of all experts that name one; returns the stamp of each.

    Args:
      folder: to which the names of files are relative.
      absent_ok: whether a file may be missing, as in computed time, where no weights
        are needed.
    Raises:
      CheckpointError: files that are missing, of a wrong size or have another sha256:
        which, of many the first ones and how many.
    """
    wrong, stamps = [], {}
    named = [n for n, e in enumerate(graph.experts) if e.file is not None]
    for number in progress(named, "files of experts checked"):
        expert = graph.experts[number]
        path = Path(folder) / expert.file
        size = graph.architectures[expert.architecture].record_bytes
        try:
            there = os.stat(path)
            reason = f"{there.st_size} bytes, expected {size}"
            if there.st_size == size:
                found = file_sha256(path)
                stamps[number], reason = stamp(there), None
                if expert.sha256 not in (None, found):
                    reason = f"sha256 {found[:12]}, expected {expert.sha256[:12]}"
        except FileNotFoundError as error:
            reason = None if absent_ok else said(error)
        except (OSError, ValueError) as error:  # ValueError: no path can be so
            reason = said(error)
        if reason is not None:
            wrong.append(f"{expert.id} ({path}: {reason})")
    if wrong:
        raise CheckpointError(
            f"weights of {some(wrong)} of {len(graph.experts)} experts are not as the "
            "graph says; copy or train them again"
        )
    return stamps


def file_sha256(path: str | Path) -> str:
    """Of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def stamp(file: os.stat_result) -> Stamp:
    """What changes with a file."""
    return file.st_size, file.st_mtime_ns, file.st_ino


def said(error: OSError | ValueError) -> str:
    """Why a file cannot be read, without its path."""
    return getattr(error, "strerror", None) or str(error)


def some(names: Sequence[str]) -> str:
    """The first ones, and how many there are."""
    more = "" if len(names) <= SHOWN else f", .. ({len(names)} in all)"
    return ", ".join(names[:SHOWN]) + more
