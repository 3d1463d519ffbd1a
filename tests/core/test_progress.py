import time

from moe_edge.core import progress


def test_without_a_terminal_lines_say_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    for _ in progress.progress(range(3), "windows"):
        time.sleep(0.05)
    with progress.counter("loading"):  # nothing to count
        time.sleep(0.05)
    lines = capsys.readouterr().err.splitlines()
    assert "windows: 0/3, 0 s" in lines and "windows: 2/3, 0 s" in lines
    assert "loading: 0 s" in lines


def test_a_short_or_silent_run_says_nothing(monkeypatch, capsys):
    assert list(progress.progress([1, 2], "x")) == [1, 2]
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    for _ in progress.progress([1], "x", shown=False):
        time.sleep(0.03)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_is_drawn(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress.progress([1, 2], "windows")) == [1, 2]
    assert "windows" in capsys.readouterr().err
