"""Reads safetensors without trusting them: files, and the shards of a folder.

A file is `uint64 n | n bytes of JSON header | tensor bytes`. The library checks its
header completely before any tensor is looked at: length, JSON, sizes that match
shapes, and offsets that tile the data without gap or overlap. Tensors are zero-copy,
read-only views of the mapped file.
Source: the format description of github.com/huggingface/safetensors.
"""

import math
import mmap
import os
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from moe_edge.checkpoint.experts_file import read_bytes
from moe_edge.checkpoint.schema import name_some
from moe_edge.core.checks import CheckpointError
from moe_edge.core.json_reader import parse_json, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 100_000_000

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsFile:
    """One mapped safetensors file.

    Attributes:
      path: the file.
      entries: tensor name -> (numpy dtype, shape, first byte in the file).
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="numpy"):
                pass  # checks the header
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                # Of three levels, as the library has checked.
                text, where = file.read(length), f"header of {path}"
                header = parse_json(where, text, CheckpointError, max_depth=None)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"cannot read {path}: {reason}") from error
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise CheckpointError(
                f"{path} is damaged or truncated: {reason}; copy it again"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)
        header.pop("__metadata__", None)
        begin = 8 + length
        try:
            self.entries: dict[str, tuple] = {
                name: (
                    DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    begin + entry["data_offsets"][0],
                )
                for name, entry in header.items()
            }
        except KeyError:
            name = next(
                n for n, entry in header.items() if entry["dtype"] not in DTYPES
            )
            raise CheckpointError(
                f"{path}: tensor {name} has unknown dtype {header[name]['dtype']!r}; "
                f"known: {', '.join(DTYPES)}"
            ) from None

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of a tensor of this file."""
        dtype, shape, start = self.entries[name]
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        flat = np.frombuffer(self._map, np.uint8, count * dtype.itemsize, start)
        return flat.view(dtype).reshape(shape)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads a tensor into a contiguous array of its dtype and size.

        A system call into memory that is reused: mapping fresh pages for every
        tensor costs several times the copy.
        """
        dtype, shape, start = self.entries[name]
        if out.dtype != dtype or out.size != math.prod(shape):
            raise ValueError(f"{name} is {dtype} {shape}, not {out.dtype} {out.shape}")
        read_bytes(self._descriptor, start, out, self.path)

    def release(self) -> None:
        """Lets the kernel drop the pages read so far from this process."""
        self._map.madvise(mmap.MADV_DONTNEED)


def open_folder(
    folder: Path, partly: bool = False
) -> dict[str, SafetensorsFile | None]:
    """Opens every shard of an HF folder: tensor name -> file that holds it.

    Args:
      partly: accept that shards are not there; their tensors' file is None then.
    Raises:
      CheckpointError: no weights, a shard missing or damaged, an index that
        disagrees with the shards, a tensor in two shards.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    # The order of transformers: a single file wins over an index.
    if single.is_file():
        names, weight_map = [SINGLE_NAME], None
    elif index.is_file():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
    else:
        weight_map = None
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{folder} has no .safetensors file (other weight formats, such as pickled "
            ".bin files, are never read)"
        )
    missing = {name for name in names if not (folder / name).is_file()}
    if missing and not partly:
        raise CheckpointError(
            f"{folder} lacks {name_some(sorted(missing))}, named by {INDEX_NAME}"
        )
    found: dict[str, SafetensorsFile] = {}
    places: dict[str, str] = {}
    for name in sorted(set(names) - missing):
        file = SafetensorsFile(folder / name)
        twice = sorted(file.entries.keys() & found.keys())
        if twice:
            raise CheckpointError(
                f"{folder}: {name_some(twice)} stand both in "
                f"{found[twice[0]].path.name} and in {name}"
            )
        found.update(dict.fromkeys(file.entries, file))
        places.update(dict.fromkeys(file.entries, name))
    if weight_map is None or places == weight_map:
        return found
    absent = {name for name, file in weight_map.items() if file in missing}
    absent -= set(found)
    wrong = {name for name, file in places.items() if file != weight_map.get(name)}
    wrong |= weight_map.keys() - found.keys() - absent
    if wrong:
        raise CheckpointError(
            f"{index.name} and the shards of {folder} disagree on "
            f"{name_some(sorted(wrong))}"
        )
    return found | dict.fromkeys(absent)


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index, with file names that stay inside the folder."""
    index = read_json(path, CheckpointError, max_bytes=_MAX_INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; expected tensor -> file name")
    seen = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in seen:
            continue
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: tensor {name} is in {file!r}, expected the plain name of a "
                ".safetensors file next to the index"
            )
        seen.add(file)
    return weight_map
