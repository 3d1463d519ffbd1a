"""Reading .npy files, which may come from anywhere."""

import threading
import tokenize
from pathlib import Path

import numpy as np

# What NumPy lets through of a damaged header; from Python 3.12 on TokenError too.
HEADER_ERRORS = (SyntaxError, tokenize.TokenError)
# A header is a Python literal, and Python 3.11 loses count when two threads parse one
# at a time: "SystemError: AST constructor recursion depth mismatch" (cpython 106905).
# Held for the whole read of an array that is not mapped: `np.load` cannot be cut.
_ONE_AT_A_TIME = threading.Lock()


def load_npy(path: str | Path, mmap_mode: str | None = None) -> np.ndarray:
    """`np.load` of one file; never unpickles.

    Raises:
      ValueError: no such file format, or a damaged header.
      EOFError, OverflowError, OSError: as `np.load`.
    """
    try:
        with _ONE_AT_A_TIME:
            return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except HEADER_ERRORS as error:
        raise ValueError(f"its header is damaged: {error}") from error
