import sys

from moe_edge.core import heap


def test_keep_heap_tells_whether_it_took_effect():
    done = heap.keep_heap()
    assert done is (sys.platform == "linux")


def test_keep_heap_other_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert heap.keep_heap() is False
