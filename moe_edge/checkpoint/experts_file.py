"""experts/layer_LLL.bin: the expert records of one MoE layer, one after another.

Record (e, sub) begins at byte (e * U + sub) * record bytes. Records are padded to 64
bytes, so one record is one aligned `preadv` or one memory-mapped row.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterable
from io import RawIOBase
from pathlib import Path

import numpy as np

from moe_edge.core.checks import CheckpointError

EXPERTS_FOLDER = "experts"
_MAX_VIEWS = os.sysconf("SC_IOV_MAX")  # arrays the kernel takes in one call


def experts_path(folder: Path, layer: int) -> Path:
    return folder / EXPERTS_FOLDER / f"layer_{layer:03d}.bin"


def write_arrays(file: RawIOBase, offset: int, arrays: Iterable[np.ndarray]) -> None:
    """Writes C-contiguous arrays one after another, in as few calls as possible."""
    views = deque(memoryview(a.reshape(-1).view(np.uint8)) for a in arrays)
    while views:
        batch = list(itertools.islice(views, _MAX_VIEWS))
        count = os.pwritev(file.fileno(), batch, offset)
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.popleft())
        if count:  # a short write
            views[0] = views[0][count:]


def read_records(path: Path, first: int, out_NR: np.ndarray) -> None:
    """Reads consecutive records into memory that the caller reuses.

    Copying from a mapping would map fresh pages, which costs several times the copy.
    """
    with path.open("rb", buffering=0) as file:
        read_bytes(file.fileno(), first * out_NR[0].nbytes, out_NR, path)


def read_bytes(descriptor: int, offset: int, out: np.ndarray, path: Path) -> None:
    """Fills a C-contiguous array with a file's bytes; `path` is for the message."""
    flat = memoryview(out.reshape(-1).view(np.uint8))
    while len(flat):
        count = os.preadv(descriptor, [flat], offset)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read")
        flat, offset = flat[count:], offset + count


def open_records(path: Path, rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Memory-maps a layer file as [rows, width], read-only.

    Raises:
      CheckpointError: missing, or not exactly rows x width elements long.
    """
    expected = rows * width * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise CheckpointError(
                f"{path} is {state}: {size} bytes, expected {expected} for {rows} "
                f"records of {width * dtype.itemsize} bytes; convert the model again"
            )
        raw = np.memmap(path, np.uint8, mode="r", shape=(expected,))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return raw.view(dtype).reshape(rows, width)
