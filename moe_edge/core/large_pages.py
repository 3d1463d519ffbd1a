"""Memory for weights in pages of 2 MB, as reading ahead stops at the end of a page.

Decoding on a CPU is 5 to 17 % faster (docs/measurements.md). The kernel hands out such
pages where memory is first written, so what is to stand in them is copied there: to
move filled memory later takes longer than to load it. Matrices are often smaller than a
page, so they stand next to each other in chunks. Mapped files have such pages, too,
where their file system knows them.
"""

import contextlib
import mmap
import threading
import weakref

import numpy as np

_PAGE = 2 << 20  # bytes
_CHUNK = 32 << 20  # bytes; those that nothing was written to take no memory
_LEAST = 256 << 10  # bytes; fewer are read from a cache
_ALIGNED = 64  # bytes; XLA copies what is not


class LargePages:
    """Hands out memory of chunks; a chunk goes back with the last array in it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._chunk = lambda: None  # the one that has room, a weak reference
        self._free = 0  # its first free byte

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """An array whose memory nothing was written to yet.

        Returns:
          None if it is small, or the system has no such pages. A system that has none
          to spare gives it pages of the usual size.
        """
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        with self._lock:
            chunk, first = self._chunk(), self._free
            if chunk is None or first + num_bytes > len(chunk):
                size = -(-(num_bytes + _PAGE) // _PAGE) * _PAGE
                chunk = _new_chunk(max(size, _CHUNK))
                if chunk is None:
                    return None
                first = -np.frombuffer(chunk, np.uint8).ctypes.data % _PAGE
                if size < _CHUNK:
                    self._chunk = weakref.ref(chunk)
            if self._chunk() is chunk:
                self._free = -(-(first + num_bytes) // _ALIGNED) * _ALIGNED
        values = np.frombuffer(chunk, dtype, num_bytes // dtype.itemsize, first)
        return values.reshape(shape)


def ask_for_file(mapping: mmap.mmap) -> None:
    """Asks for large pages of a mapped file, before anything of it is read.

    What the system has to read from the disk is then in them, if the file system knows
    such (ext4 in Linux 6.18 does); what is in memory already stays in the pages it has.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)


def _new_chunk(num_bytes: int) -> mmap.mmap | None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        chunk = mmap.mmap(-1, num_bytes, flags=flags)
        chunk.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or no memory for so many at once
        return None
    return chunk
