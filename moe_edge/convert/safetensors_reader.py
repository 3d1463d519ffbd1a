"""Reads safetensors files without trusting them.

A file is `uint64 n | n bytes of JSON header | tensor bytes`. The header is checked
completely before any tensor is looked at: its length, the JSON, known dtypes, sizes
that match shapes, and offsets that tile the data without gap or overlap. Tensors are
zero-copy, read-only views of the mapped file.
Source: the format description of github.com/huggingface/safetensors.
"""

import json
import math
import mmap
import os
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np

from moe_edge.core.checks import CheckpointError

# The limit of the reference implementation.
MAX_HEADER_BYTES = 100_000_000

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
            size = path.stat().st_size
            with path.open("rb") as file:
                prefix = file.read(8)
                length = int.from_bytes(prefix, "little")
                if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                    raise CheckpointError(
                        f"{path}: header length {length} does not fit a file of {size} "
                        f"bytes (at most {MAX_HEADER_BYTES}); damaged or truncated"
                    )
                header = file.read(length)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.entries = _parse_header(path, header, 8 + length, size)

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
        flat = out.reshape(-1).view(np.uint8)
        if out.dtype != dtype or out.size != math.prod(shape):
            raise ValueError(f"{name} is {dtype} {shape}, not {out.dtype} {out.shape}")
        done = 0
        while done < flat.size:
            count = os.preadv(self._descriptor, [flat[done:]], start + done)
            if not count:
                raise CheckpointError(f"{self.path} became shorter while it was read")
            done += count

    def release(self) -> None:
        """Lets the kernel drop the pages read so far from this process."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _no_duplicates(pairs: list) -> dict:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        raise ValueError("a key appears twice")
    return seen


def _parse_header(path: Path, header: bytes, data_start: int, size: int) -> dict:
    """Checks a header and returns `entries`."""
    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            f"{path}: header is a JSON {type(parsed).__name__}, expected an object"
        )
    parsed.pop("__metadata__", None)
    entries, spans = {}, []
    for name, entry in parsed.items():
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        expected = math.prod(shape) * dtype.itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name} spans {end - begin} bytes, but {dtype} "
                f"{list(shape)} needs {expected}"
            )
        entries[name] = (dtype, shape, data_start + begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            problem = "overlaps another tensor" if begin < position else "leaves a gap"
            raise CheckpointError(
                f"{path}: tensor {name} begins at byte {begin} of the data, expected "
                f"{position}: it {problem}"
            )
        position = end
    if data_start + position != size:
        state = "truncated" if size < data_start + position else "too long"
        raise CheckpointError(
            f"{path} is {state}: its header describes {data_start + position} bytes, "
            f"the file has {size}; copy it again"
        )
    return entries


def _parse_entry(path: Path, name: str, entry) -> tuple:
    """dtype, shape, begin, end of one header entry, all checked for type and sign."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise CheckpointError(
            f"{path}: header entry of {name} must have exactly {sorted(keys)}"
        )
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has unknown dtype {entry['dtype']!r}; known: "
            f"{', '.join(DTYPES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    for label, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(
            isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 1 << 62
            for n in numbers
        ):
            raise CheckpointError(
                f"{path}: {label} of tensor {name} is {str(numbers)[:80]}, expected a "
                "list of non-negative integers"
            )
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > 8:
        raise CheckpointError(
            f"{path}: tensor {name} has data_offsets {offsets[:4]} and {len(shape)} "
            "dimensions, expected begin <= end and at most 8"
        )
    return DTYPES[entry["dtype"]], tuple(shape), *offsets
