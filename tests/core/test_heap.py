import mmap
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_edge.core import heap


def test_keep_heap_tells_whether_it_took_effect():
    done = heap.keep_heap()
    assert done is (sys.platform == "linux")


def test_keep_heap_other_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert heap.keep_heap() is False


def large_bytes_of(address: int) -> int:
    """Bytes in large pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            inside = first <= address < end
        elif inside and name == "AnonHugePages:":
            return int(rest[0]) << 10
    return 0


def test_use_large_pages_filled_memory_moves_into_them():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this system does not leave large pages to programs")
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel does not move memory at once")
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(memory, np.float32)
    values[:] = np.arange(4 << 20)
    middle = values.ctypes.data + (8 << 20)
    before = large_bytes_of(middle)
    heap.use_large_pages(values.ctypes.data, values.nbytes)
    assert large_bytes_of(middle) >= max(before, 12 << 20)
    np.testing.assert_array_equal(values, np.arange(4 << 20))


def test_use_large_pages_small_or_missing_memory_is_left_alone():
    assert heap.use_large_pages(0, 100) is False
    assert heap.use_large_pages(0, 1 << 20) is False  # nobody's


def test_use_large_pages_other_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert heap.use_large_pages(1 << 30, 1 << 20) is False
