"""How an executor's memory is split between experts and batches (CoServe, 4.4).

A slow processor keeps what its largest batch needs, and experts get the rest. For a
fast one, where batches may take most of the memory, a window slides over the number
of experts until a measured throughput falls behind its trend.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import CapacityError, ConfigError, check_count

SOURCE = "CoServe (ASPLOS 2025), section 4.4"


def pool_bytes(
    kind: str, memory_bytes: int, executors: int, batch_bytes: int, least_bytes: int
) -> int:
    """Bytes of the pool of each of some equal executors.

    Args:
      kind: of processor, for the message.
      memory_bytes: of all of them together.
      batch_bytes: that a batch of one needs.
      least_bytes: of the smallest expert, which has to fit.
    Raises:
      CapacityError: it does not; the smallest memory that works is named.
    """
    check_count("executors", executors)
    each = memory_bytes // executors - batch_bytes
    if each < least_bytes:
        need = executors * (batch_bytes + least_bytes)
        raise CapacityError(
            f"{executors} {kind} executors have {memory_bytes} bytes; each needs "
            f"{batch_bytes} for a batch and {least_bytes} for the smallest "
            f"expert: expected at least {need}, or fewer executors"
        )
    return each


class Window(NamedTuple):
    """Where the throughput fell behind.

    Attributes:
      low, high: number of experts at its ends; chosen: between them.
      tried: (experts, throughput) of every measured number.
    """

    low: int
    high: int
    chosen: int
    tried: tuple[tuple[int, float], ...]


def decaying_window(
    throughput: Callable[[int], float],
    most: int,
    start: int = 15,
    margin: float = 0.05,
) -> Window:
    """Slides a shrinking window over numbers of resident experts.

    It is `start` wide at first and 1 - start/100 times as wide with each slide. The
    throughput is measured at its upper end and compared with the line through all
    values so far.

    Args:
      throughput: measures a number of experts.
      most: experts for which there is memory.
      margin: part of the predicted throughput by which it may be missed.
    Returns:
      the window at whose upper end it is missed by more, or the last one. The paper
      takes any number within; this takes the middle.
    Raises:
      ConfigError: start, margin or most out of range.
    """
    check_count("most", most)
    check_window(start, margin)
    tried: list[tuple[int, float]] = []
    low, high, width = 0, min(start, most), float(start)
    upper = float(start)
    while True:
        value = throughput(high)
        behind = False
        if len(tried) > 1:
            places = np.arange(len(tried))
            slope, first = np.polyfit(places, [found for _, found in tried], 1)
            expected = slope * len(tried) + first
            behind = expected > 0 and (expected - value) / expected > margin
        tried.append((high, value))
        width *= 1 - start / 100
        following = min(round(upper + width), most)
        if behind or following <= high:
            return Window(low, high, (low + high + 1) // 2, tuple(tried))
        upper += width
        low, high = high, following


def check_window(start: int, margin: float, prefix: str = "") -> None:
    """Raises ConfigError: out of range; `prefix`: of their names, for the message."""
    if not 0 < start < 100 or not 0 <= margin < 1:
        raise ConfigError(
            f"{prefix}start is {start} and {prefix}margin {margin}, expected 1 to 99 "
            "and [0, 1)"
        )
