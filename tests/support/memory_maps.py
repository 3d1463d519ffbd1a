"""Forgets compiled programs before the kernel's limit on memory maps kills a worker.

A compiled program takes three to five maps of memory, and Linux allows a process
65,530: after some ten thousand programs the next one ends it by a signal.
"""

import gc
from pathlib import Path

import jax

MOST_MAPS = 35_000  # one module's tests may add some thousands before the next look
_MAPS = Path("/proc/self/maps")  # only Linux has it, and only Linux the limit


def count() -> int:
    """Memory maps of this process; 0 where nobody counts them."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def free_programs(most: int = MOST_MAPS) -> None:
    """Drops all compiled programs if they take more maps than `most`."""
    if count() > most:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
