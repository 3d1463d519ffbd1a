"""Keeps NumPy's matrix products on their caller's thread.

Experts are solved in parallel, and machines are shared: products that each want all
cores then wait for one another (measured under load: 0.1 s an expert becomes 0.7 s).
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LOCK = threading.Lock()
_INSIDE = {"callers": 0, "before": 0}


@contextlib.contextmanager
def one_blas_thread() -> Iterator[bool]:
    """One thread a product inside the block, for the whole process.

    Blocks may nest and overlap; the last one to end restores what was set before.

    Yields:
      whether it could be done: other NumPy builds than the usual wheels keep theirs.
    """
    functions = _openblas()
    if functions is None:
        yield False
        return
    read, write = functions
    with _LOCK:
        if not _INSIDE["callers"]:
            _INSIDE["before"] = read()
            write(1)
        _INSIDE["callers"] += 1
    try:
        yield True
    finally:
        with _LOCK:
            _INSIDE["callers"] -= 1
            if not _INSIDE["callers"]:
                write(_INSIDE["before"])


@functools.cache
def _openblas():
    """Getter and setter of the OpenBLAS that NumPy's wheels bring along, or None."""
    libraries = Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")
    for path in libraries:
        library = ctypes.CDLL(str(path))
        for suffix in ("64_", ""):
            name = f"scipy_openblas_{{}}_num_threads{suffix}"
            read = getattr(library, name.format("get"), None)
            write = getattr(library, name.format("set"), None)
            if read and write:
                return read, write
    return None
