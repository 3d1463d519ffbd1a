"""What a machine could do at best: the rates behind the bounds of the suites."""

import functools
import statistics

import jax
import numpy as np

from moe_edge.bench.rounds import interleave_seconds
from moe_edge.hardware.calibrate import copy_rate
from moe_edge.offload.store import pin_records
from moe_edge.studies.speed.decode import memory_bandwidth


def link_rate(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second of a large host-to-device copy, pinned where possible."""
    source = np.ones(num_bytes // 4, np.float32)
    copy = functools.partial(jax.numpy.array, source)
    if jax.default_backend() != "cpu":
        pinned = pin_records(source)
        there = pinned.sharding.with_memory_kind("device")  # a device keeps the kind
        copy = functools.partial(jax.device_put, pinned, there)
    cases = {"copy": lambda: copy().block_until_ready()}
    return num_bytes / statistics.median(interleave_seconds(cases, repeats)["copy"])


def device_bandwidth(num_bytes: int = 1 << 31, repeats: int = 5) -> float:
    """Bytes per second of the device's memory: read, or read and written."""
    if jax.default_backend() == "cpu":
        return max(memory_bandwidth().values())
    return copy_rate(num_bytes, repeats)  # so large that a launch hardly counts
