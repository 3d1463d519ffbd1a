"""What memory a device has, and how much of it is free."""

import os
from pathlib import Path

import jax


def device_memory_bytes(device: jax.Device | None = None) -> int | None:
    """What a device (None: the first) has in all; None if it does not say."""
    stats = (device or jax.local_devices()[0]).memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_device_bytes(device: jax.Device | None = None) -> int | None:
    """What of a device (None: the first) is free now; None if it does not say."""
    stats = (device or jax.local_devices()[0]).memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if jax.default_backend() == "cpu" and meminfo.is_file():
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = [line.split() for line in lines if line.startswith("MemAvailable:")]
        return int(sizes[0][1]) * 1024 if sizes else None
    return None
