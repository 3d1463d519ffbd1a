"""Timing several things in one run, interleaved, so that machine noise hits all."""

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np


def interleave(
    cases: dict[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Calls every case `repeats` times in turn (A B C A B C ...).

    Each case is first called once unmeasured: compilation, page faults, caches.

    Args:
      cases: name -> function that returns its own figure (seconds, or a rate).
      repeats: measured calls of each.
    Returns:
      name -> figures in the order of the calls.
    """
    for case in cases.values():
        case()
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            figures[name].append(case())
    return figures


def median_ratio(ours: list[float], peer: list[float]) -> float:
    """Median over rounds of ours / peer, each round measured side by side."""
    return statistics.median(a / b for a, b in zip(ours, peer, strict=True))


def memory_bandwidth(num_bytes: int = 1 << 28, threads: int = 2, repeats: int = 5):
    """Bytes per second that a large copy moves, reads and writes both counted.

    Args:
      num_bytes: size of the copied array, well above the last-level cache.
      threads: how many copies run side by side, each on its part.
    """
    source = np.ones(num_bytes, np.uint8)
    target = np.zeros_like(source)
    parts = list(zip(np.split(source, threads), np.split(target, threads), strict=True))
    best = float("inf")
    for _ in range(repeats):
        workers = [
            threading.Thread(target=np.copyto, args=(to, part)) for part, to in parts
        ]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - started)
    return 2 * num_bytes / best
