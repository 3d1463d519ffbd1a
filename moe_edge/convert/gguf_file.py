"""Reads GGUF files without trusting them: metadata, and where tensors lie.

A file is `"GGUF" | version | counts | metadata | tensor infos | padding | tensors`,
little-endian. Every count, length and offset is held against the bytes that are there
before anything is made from it, so a file that lies is refused at once and in one line.
Source: the format's description, docs/gguf.md of github.com/ggml-org/ggml.
"""

import math
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_edge.checkpoint.experts_file import read_bytes
from moe_edge.convert.gguf_blocks import KINDS, NAMES, decode
from moe_edge.convert.gguf_cursor import Cursor
from moe_edge.core.checks import CheckpointError

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ENTRIES = 1 << 20  # metadata keys, or tensors
_MAX_SIZE = 1 << 48
_ALIGNMENT = "general.alignment"


class Tensor(NamedTuple):
    """Where a tensor lies."""

    kind: str  # of KINDS
    shape: tuple[int, ...]  # rows first, as numpy's
    start: int  # first byte in the file
    size: int  # bytes
    part: int = 0  # of a model in several files


class GgufFile:
    """One GGUF file, opened, perhaps with further parts of the same model.

    Attributes:
      path: the file.
      metadata: key -> value.
      tensors: name -> where it lies.
    """

    def __init__(self, path: Path):
        self.path = path
        self._others: list[GgufFile] = []
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{path} is not a regular file")
                if status.st_size < 24:
                    raise CheckpointError(
                        f"{path} has {status.st_size} bytes, expected a GGUF file of "
                        "24 or more; copy it again"
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._read_header(Cursor(path, data), status.st_size)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror or error}"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)

    def _read_header(self, cursor: Cursor, size: int) -> None:
        _check_version(cursor)
        num_tensors = cursor.count("the number of tensors", _MAX_ENTRIES)
        num_keys = cursor.count("the number of metadata keys", _MAX_ENTRIES)
        self.metadata: dict[str, Any] = {}
        for i in range(num_keys):
            key = cursor.name(f"metadata key {i}")
            if key in self.metadata:
                raise cursor.bad(f"metadata key {key} appears twice")
            self.metadata[key] = cursor.value(key)
        found: dict[str, Tensor] = {}
        for i in range(num_tensors):
            name = cursor.name(f"the name of tensor {i}")
            if name in found:
                raise cursor.bad(f"tensor {name} appears twice")
            found[name] = _tensor_info(cursor, name)
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment not in (1 << n for n in range(21)):
            raise cursor.bad(
                f"{_ALIGNMENT} is {alignment!r:.60}, expected a power of two up to "
                f"{1 << 20}"
            )
        self.tensors = _placed(cursor, found, alignment, size)

    @property
    def parts(self) -> list["GgufFile"]:
        """The files of the model, this one first."""
        return [self, *self._others]

    def add(self, other: "GgufFile") -> None:
        """Takes the tensors of another part of the model.

        Raises:
          CheckpointError: one that is there already.
        """
        for name, tensor in other.tensors.items():
            if name in self.tensors:
                raise CheckpointError(
                    f"{other.path}: tensor {name} is in another part of the model, "
                    "too; copy the parts of one model again"
                )
            self.tensors[name] = tensor._replace(part=len(self.parts))
        self._others.append(other)

    def read(self, name: str, first: int = 0, count: int | None = None) -> np.ndarray:
        """Decoded weights of a tensor, or of part of it along its first axis.

        Args:
          first, count: which part; None: all.
        """
        tensor = self.tensors[name]
        shape = tensor.shape if count is None else (count, *tensor.shape[1:])
        return decode(tensor.kind, self.read_raw(name, first, count)).reshape(shape)

    def read_raw(
        self, name: str, first: int = 0, count: int | None = None, pieces: int = 1
    ) -> np.ndarray:
        """The bytes of the same, uint8.

        Args:
          pieces: into how many each index of the first axis is cut; `first` and
            `count` count these.
        """
        tensor = self.tensors[name]
        size = tensor.size // (tensor.shape[0] * pieces)
        raw = np.empty(tensor.size if count is None else count * size, np.uint8)
        self.read_into(name, first, raw, pieces)
        return raw

    def read_into(
        self, name: str, first: int, out: np.ndarray, pieces: int = 1
    ) -> None:
        """The same, into a contiguous array; its size says how much."""
        tensor = self.tensors[name]
        start = tensor.start + first * (tensor.size // (tensor.shape[0] * pieces))
        if start + out.nbytes > tensor.start + tensor.size:
            raise ValueError(f"{name} has {tensor.size} bytes, not {out.nbytes}")
        file = self.parts[tensor.part]
        read_bytes(file._descriptor, start, out, file.path)


def _check_version(cursor: Cursor) -> None:
    magic = cursor.number("4s", "the magic number")
    if magic != b"GGUF":
        raise CheckpointError(
            f"{cursor.path} begins with {magic!r}, expected b'GGUF'; name a GGUF file"
        )
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        order = "big-endian " if swapped in (1, *_VERSIONS) else ""
        raise CheckpointError(
            f"{cursor.path} is {order}GGUF version {swapped if order else version}, "
            "expected little-endian version 2 or 3; convert the model again with a "
            "newer llama.cpp"
        )


def _tensor_info(cursor: Cursor, name: str) -> Tensor:
    """A tensor whose `start` still counts from the first tensor's."""
    num_dims = cursor.number("I", f"the rank of {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.bad(f"tensor {name} has rank {num_dims}, expected 1 to 4")
    dims = [cursor.number("Q", f"the shape of {name}") for _ in range(num_dims)]
    code = cursor.number("I", f"the type of {name}")
    start = cursor.number("Q", f"the offset of {name}")
    shape = tuple(reversed(dims))  # the file says the fastest axis first
    if not 0 < math.prod(shape) <= _MAX_SIZE:
        raise cursor.bad(f"tensor {name} has shape {shape}, which no model has")
    label = NAMES.get(code, f"number {code}")
    if label not in KINDS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has type {label}; known: "
            f"{', '.join(KINDS)}; make such a file by llama-quantize"
        )
    kind = KINDS[label]
    if shape[-1] % kind.values:
        raise cursor.bad(
            f"tensor {name} of type {label} has rows of {shape[-1]}, expected a "
            f"multiple of {kind.values}"
        )
    return Tensor(label, shape, start, math.prod(shape) // kind.values * kind.size)


def _placed(
    cursor: Cursor, found: dict[str, Tensor], alignment: int, size: int
) -> dict[str, Tensor]:
    """Tensors by their place in the file, aligned, inside of it, apart."""
    base = -(-cursor.position // alignment) * alignment
    end, before = base, "the header"
    placed = {n: t._replace(start=base + t.start) for n, t in found.items()}
    for name, tensor in sorted(placed.items(), key=lambda item: item[1].start):
        if (tensor.start - base) % alignment:
            raise cursor.bad(
                f"tensor {name} is at offset {tensor.start - base}, expected a "
                f"multiple of {alignment}"
            )
        if tensor.start < end:
            raise cursor.bad(
                f"tensor {name} begins at byte {tensor.start}, inside {before}, which "
                f"ends at {end}"
            )
        end, before = tensor.start + tensor.size, name
        if end > size:
            raise CheckpointError(
                f"{cursor.path} is damaged or truncated: tensor {name} ends at byte "
                f"{end}, the file has {size}; copy it again"
            )
    return placed
