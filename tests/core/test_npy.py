import time
import tokenize
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moe_edge.core.npy import load_npy


def test_load_npy_gives_back_an_array(tmp_path):
    array = np.arange(6).reshape(2, 3)
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(load_npy(tmp_path / "a.npy"), array)
    mapped = load_npy(tmp_path / "a.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)


def test_load_npy_never_unpickles(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("kind", [SyntaxError, tokenize.TokenError])
def test_load_npy_damaged_header_is_a_value_error(kind, monkeypatch):
    def load(*args, **options):
        raise kind("null bytes")

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(ValueError, match="its header is damaged: null bytes"):
        load_npy("a.npy")


def test_headers_are_parsed_by_one_thread_at_a_time(monkeypatch):
    """Two at once are a SystemError in Python 3.11, now and then."""
    running, most = [], []

    def load(path, **_):
        running.append(path)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    monkeypatch.setattr(np, "load", load)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load_npy, "abcd"))
    assert most == [1] * 4
