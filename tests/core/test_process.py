"""Calls in a process of their own, and what memory one took."""

from pathlib import Path

from moe_edge.core.process import peak_rss_bytes


def test_peak_memory_is_known_wherever_it_stands(monkeypatch):
    here = peak_rss_bytes()
    assert here > 10**7
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: a sandbox")
    assert 0.3 * here < peak_rss_bytes() < 3 * here
