"""Writes safetensors shards piece by piece, without holding tensors in memory.

Headers are planned from names, dtypes and shapes; bytes are then written at their
offsets in whatever order they come.
"""

import json
import math
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.experts_file import write_arrays
from moe_edge.checkpoint.schema import Shapes
from moe_edge.convert.rules import Piece
from moe_edge.convert.safetensors_reader import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME
from moe_edge.core.checks import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "512MiB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(
            f"size {text!r} is not a positive number with B, MB, GB, GiB.."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


class SafetensorsWriter:
    """Writes the tensors of `shapes` into `folder`; from several threads, if need be.

    Args:
      folder: existing folder; shards of the same plan in it keep their bytes.
      shapes: name -> shape, in the order of the files.
      dtypes: name -> numpy dtype.
      shard_bytes: most tensor bytes a shard; one bigger tensor has its own.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Shapes,
        dtypes: dict[str, np.dtype],
        shard_bytes: int,
    ):
        self._dtypes = dtypes
        self._files: dict[str, tuple] = {}  # tensor -> (open file, offset)
        self._left = {name: math.prod(shape) for name, shape in shapes.items()}
        sizes = {n: self._left[n] * dtypes[n].itemsize for n in shapes}
        shards = _plan(sizes, shard_bytes)
        names = [
            SINGLE_NAME
            if len(shards) == 1
            else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            for i in range(len(shards))
        ]
        self._handles, self._lock = [], threading.Lock()
        for file_name, tensors in zip(names, shards, strict=True):
            header, start = {"__metadata__": {"format": "pt"}}, 0
            for name in tensors:
                header[name] = {
                    "dtype": DTYPE_NAMES[dtypes[name]],
                    "shape": list(shapes[name]),
                    "data_offsets": [start, start + sizes[name]],
                }
                start += sizes[name]
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            (folder / file_name).touch()
            handle = (folder / file_name).open("r+b", buffering=0)
            header_bytes = len(text).to_bytes(8, "little") + text
            write_arrays(handle, 0, [np.frombuffer(header_bytes, np.uint8)])
            self._handles.append(handle)
            for name in tensors:
                offset = 8 + len(text) + header[name]["data_offsets"][0]
                self._files[name] = (handle, offset)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {
                    name: file_name
                    for file_name, tensors in zip(names, shards, strict=True)
                    for name in tensors
                },
            }
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, *pieces: Piece) -> None:
        """Writes some bytes of tensors at their places, neighbours together."""
        run: list[np.ndarray] = []
        place: tuple = (None, 0, 0)  # file, first byte and end of the run
        for name, first, array in pieces:
            if array.dtype != self._dtypes[name]:
                raise ConfigError(
                    f"{name} came as {array.dtype}, planned as {self._dtypes[name]}"
                )
            handle, offset = self._files[name]
            offset += first * array.dtype.itemsize
            if (handle, offset) != (place[0], place[2]):
                if run:
                    write_arrays(place[0], place[1], run)
                run, place = [], (handle, offset, offset)
            run.append(array)
            place = (*place[:2], place[2] + array.nbytes)
            with self._lock:
                self._left[name] -= array.size
        if run:
            write_arrays(place[0], place[1], run)

    def skip(self, names: Iterable[str]) -> None:
        """Takes tensors as written by an earlier writer of the same plan."""
        self._left |= dict.fromkeys(names, 0)

    def close(self) -> None:
        """Closes the shards."""
        for handle in self._handles:
            handle.close()

    def check_complete(self) -> None:
        """Raises ConfigError if a tensor was not written completely."""
        unfinished = [name for name, left in self._left.items() if left]
        if unfinished:
            raise ConfigError(f"tensor {unfinished[0]} was not written completely")


def _plan(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Consecutive tensors in shards of at most `limit` bytes."""
    shards, used = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
