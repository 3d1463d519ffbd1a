"""Reading .npy files from several threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moe_edge.core.npy import load_npy


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
