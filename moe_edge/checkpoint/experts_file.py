"""experts/layer_LLL.bin: the expert records of one MoE layer, one after another.

Record (e, sub) begins at byte (e * U + sub) * record bytes. Records are padded to 64
bytes, so one record is one aligned `preadv` or one memory-mapped row. After the last
one follow 64 bytes that say which layer's file it is (checksums.py).
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path

import numpy as np

from moe_edge.checkpoint.checksums import check_records, check_trailer, crc32
from moe_edge.core.checks import CheckpointError
from moe_edge.core.large_pages import ask_for_file
from moe_edge.core.process import cpu_cores

EXPERTS_FOLDER = "experts"
_MAX_VIEWS = os.sysconf("SC_IOV_MAX")  # arrays the kernel takes in one call
# Of records that a thread reads, then checks in its cache. A larger record is read and
# checked as a whole: in pieces of 4 MiB one of 128 MiB took as much processor time.
PART_BYTES = 4 << 20
_MAX_THREADS = 8  # more would wait for the disk, or for memory


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


def read_records(
    path: Path, first: int, out_NR: np.ndarray, crcs: Sequence[int] | None
) -> None:
    """Reads consecutive records into memory that the caller reuses.

    Copying from a mapping would map fresh pages, which costs several times the copy.

    Args:
      crcs: of all records of the layer; None: they are not checked.
    Raises:
      CheckpointError: the file became shorter, or a record is damaged.
    """
    with path.open("rb", buffering=0) as file:

        def read(part: slice) -> None:
            start, records = first + part.start, out_NR[part]
            read_bytes(file.fileno(), start * out_NR[0].nbytes, records, path)
            if crcs is not None:
                check_records(path, start, records, crcs)

        in_parts(out_NR, read)


def in_parts(records_NR: np.ndarray, call: Callable[[slice], None]) -> None:
    """Calls a function for parts of records, in several threads if there are several.

    Raises: what the first part that fails raises.
    """
    size = max(1, PART_BYTES // records_NR[0].nbytes)
    parts = [slice(row, row + size) for row in range(0, len(records_NR), size)]
    if len(parts) == 1:
        return call(parts[0])
    with ThreadPoolExecutor(min(len(parts), cpu_cores(), _MAX_THREADS)) as pool:
        for _ in pool.map(call, parts):
            pass


def record_crcs(records_NR: np.ndarray) -> list[int]:
    """CRC-32 of every record."""
    found = [0] * len(records_NR)

    def note(part: slice) -> None:
        found[part] = map(crc32, records_NR[part])

    in_parts(records_NR, note)
    return found


def read_bytes(descriptor: int, offset: int, out: np.ndarray, path: Path) -> None:
    """Fills a C-contiguous array with a file's bytes; `path` is for the message."""
    flat = memoryview(out.reshape(-1).view(np.uint8))
    while len(flat):
        count = os.preadv(descriptor, [flat], offset)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read")
        flat, offset = flat[count:], offset + count


def open_records(
    path: Path,
    rows: int,
    width: int,
    dtype: np.dtype,
    trailer: bytes = b"",
    large_pages: bool = False,
) -> np.ndarray:
    """Memory-maps a layer file as [rows, width], read-only.

    Args:
      trailer: what must follow the records.
      large_pages: where the system can (`ask_for_file`).
    Raises:
      CheckpointError: missing, not exactly rows x width elements and the trailer long,
        or with another trailer.
    """
    record_bytes = rows * width * dtype.itemsize
    expected = record_bytes + len(trailer)
    try:
        size = path.stat().st_size
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise CheckpointError(
                f"{path} is {state}: {size} bytes, expected {expected} for {rows} "
                f"records of {width * dtype.itemsize} bytes; convert the model again"
            )
        raw = np.memmap(path, np.uint8, mode="r", shape=(expected,))
        if large_pages:
            ask_for_file(raw.base)
        check_trailer(path, raw[record_bytes:].tobytes(), trailer)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return raw[:record_bytes].view(dtype).reshape(rows, width)
