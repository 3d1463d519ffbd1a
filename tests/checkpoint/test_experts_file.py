"""Many arrays written as one run of bytes."""

import os

import ml_dtypes
import numpy as np

from moe_edge.checkpoint import experts_file


def test_write_arrays_goes_on_after_short_writes(tmp_path, monkeypatch):
    arrays = [
        np.arange(7, dtype=np.float32),
        np.empty(0, np.float32),
        np.ones((2, 3), ml_dtypes.bfloat16),
        np.arange(5, dtype=np.uint8),
    ]
    calls = []

    def short(descriptor, views, offset):
        calls.append(len(views))
        data = b"".join(views)[:10]
        return os.pwrite(descriptor, data, offset)

    monkeypatch.setattr(experts_file.os, "pwritev", short)
    monkeypatch.setattr(experts_file, "_MAX_VIEWS", 2)
    path = tmp_path / "x"
    with path.open("wb", buffering=0) as file:
        experts_file.write_arrays(file, 3, arrays)
    expected = b"".join(array.tobytes() for array in arrays)
    assert path.read_bytes() == bytes(3) + expected
    assert max(calls) == 2 and len(calls) >= 5
