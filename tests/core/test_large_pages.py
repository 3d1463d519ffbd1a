import dataclasses
import mmap
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_edge.core.large_pages import LargePages
from moe_edge.engine.weights import load_weights, to_device
from tests.support.tiny_models import BF16, GQA, RandomReader

MB = 1 << 20
FLOAT32 = np.dtype(np.float32)
needs_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="no system that has large pages"
)


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


@needs_pages
def test_what_is_written_stands_in_large_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system does not give large pages to programs")
    given = LargePages().empty((10 * MB,), FLOAT32)
    given[:] = np.arange(10 * MB)
    assert large_bytes_of(given.ctypes.data) >= 36 * MB
    np.testing.assert_array_equal(given, np.arange(10 * MB))


@needs_pages
def test_small_arrays_stand_next_to_each_other_and_none_overlap():
    pages = LargePages()
    sizes = [300_001, 70_000, 2 * MB, 300_003, 5 * MB, 20 * MB, 3 * MB, 40 * MB, 9 * MB]
    given = [pages.empty((size,), np.dtype(np.uint8)) for size in sizes]
    assert given.pop(1) is None  # from a cache all the same
    for number, array in enumerate(given):
        assert array.ctypes.data % 64 == 0
        array[:] = number
    assert given[1].ctypes.data - given[0].ctypes.data == 300_032
    for number, array in enumerate(given):
        assert (array == number).all()


@needs_pages
def test_threads_get_memory_of_their_own():
    pages, found = LargePages(), []

    def take():
        found.extend(pages.empty((MB,), np.dtype(np.uint8)) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(array.ctypes.data for array in found)
    assert len(starts) == 200 and min(np.diff(starts)) >= MB


@needs_pages
def test_a_chunk_goes_back_with_the_last_array_in_it():
    pages = LargePages()
    first, second = (pages.empty((MB,), FLOAT32) for _ in range(2))
    first[:], second[:] = 1, 2
    del first
    chunk = pages._chunk
    assert chunk() is not None and (second == 2).all()
    del second
    assert chunk() is None
    assert pages.empty((MB,), FLOAT32) is not None  # of another chunk


@pytest.mark.parametrize("system", ["without the call", "refuses", "out of memory"])
def test_other_systems_are_left_alone(system, monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, option):
            raise OSError(22, "Invalid argument")

    def none_left(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    if system == "without the call":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif hasattr(mmap, "MADV_HUGEPAGE"):
        fails = Refuses if system == "refuses" else none_left
        monkeypatch.setattr(mmap, "mmap", fails)
    else:
        pytest.skip("no system that has large pages")
    assert LargePages().empty((MB,), FLOAT32) is None
    values = np.arange(MB, dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(to_device(values), values)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
def test_weights_on_the_device_are_a_copy_that_steps_may_even_be_given(dtype):
    values = np.arange(MB, dtype=np.uint32).astype(dtype).reshape(1024, -1)
    stored = values.copy()
    array = to_device(stored)
    stored[:] = 0  # a file's page, a buffer that is read into again
    np.testing.assert_array_equal(array, values)
    changed = jax.jit(lambda x: x + np.ones((), dtype), donate_argnums=0)(array)
    np.testing.assert_array_equal(changed, values + np.ones((), dtype))


def test_experts_are_read_to_where_they_stay():
    """So no layer of them is in memory twice while a model loads."""
    read = []

    class Noting(RandomReader):
        def read_experts(self, layer, first, out_NR):
            read.append(out_NR.ctypes.data)
            super().read_experts(layer, first, out_NR)

    moe = dataclasses.replace(GQA.moe, expert_dim=1024)
    weights = load_weights(Noting(dataclasses.replace(GQA, moe=moe), 0, BF16))
    experts = [each for each in weights.experts if each is not None]
    assert [each.unsafe_buffer_pointer() for each in experts] == read
