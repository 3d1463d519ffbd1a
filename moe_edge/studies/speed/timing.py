"""Timing several things in one run, interleaved, so that machine noise hits all."""

import collections
import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from moe_edge.metrics.machine import cpu_cores

T = TypeVar("T")


def interleave(cases: dict[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Calls every case `repeats` times in turn; who begins goes round (A B C B C A).

    Each case is first called once unmeasured: compilation, page faults, caches.

    Args:
      cases: name -> function that returns its own figure (seconds, a rate, ...).
      repeats: measured calls of each.
    Returns:
      name -> figures in the order of the rounds.
    """
    for case in cases.values():
        case()
    figures: dict[str, list[T]] = {name: [] for name in cases}
    order = collections.deque(cases)
    for _ in range(repeats):
        for name in order:
            figures[name].append(cases[name]())
        order.rotate(-1)
    return figures


def round_ratios(ours: list[float], peer: list[float]) -> list[float]:
    """ours / peer of every round, measured side by side."""
    return [a / b for a, b in zip(ours, peer, strict=True)]


def memory_bandwidth(num_bytes: int = 1 << 28, repeats: int = 5) -> dict[str, float]:
    """Bytes per second of a large copy and of a large read, the best of `repeats`.

    Decoding only reads, so the larger of both is its limit; a copy alone, with its
    writes, can come out below what a reading program reaches.

    Args:
      num_bytes: size of the array, well above the last-level cache.
    Returns:
      {"copy": reads and writes both counted, "read": ...}.
    """
    threads = cpu_cores()
    num_bytes -= num_bytes % (8 * threads)
    source = np.ones(num_bytes // 8, np.int64)
    target = np.zeros_like(source)
    parts = np.split(source, threads), np.split(target, threads)
    copy = [
        functools.partial(np.copyto, to, part) for part, to in zip(*parts, strict=True)
    ]
    read = [functools.partial(np.bitwise_or.reduce, part) for part in parts[0]]
    return {
        "copy": 2 * num_bytes / _side_by_side(copy, repeats),
        "read": num_bytes / _side_by_side(read, repeats),
    }


def _side_by_side(jobs: list[Callable[[], object]], repeats: int) -> float:
    """Best seconds of running the jobs, a thread each."""
    best = float("inf")
    for _ in range(repeats):
        workers = [threading.Thread(target=job) for job in jobs]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - started)
    return best
