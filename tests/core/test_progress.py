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


def test_only_the_innermost_counter_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    with progress.counter("outer"):
        with progress.counter("inner", 5) as count:
            count(2)
            time.sleep(0.1)
        inside = capsys.readouterr().err.splitlines()
        time.sleep(0.1)
    assert set(inside) == {"inner: 2/5, 0 s"}
    assert set(capsys.readouterr().err.splitlines()) == {"outer: 0 s"}


def test_a_line_waits_while_something_else_is_said(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    with progress.counter("outer"):
        for _ in range(20):
            progress.said()
            time.sleep(0.02)
    assert capsys.readouterr().err == ""


def test_short_parts_one_after_another_are_not_silent(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.1)
    with progress.counter("outer"):
        for number in range(15):
            with progress.counter(f"part {number}"):
                time.sleep(0.02)
    assert 1 <= len(capsys.readouterr().err.splitlines()) <= 4


def test_who_waits_is_silent_and_what_it_does_is_not(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    with progress.counter("serve"), progress.waiting():
        time.sleep(0.06)
        assert capsys.readouterr().err == ""
        with progress.counter("loading"):
            time.sleep(0.06)
        assert "loading: 0 s" in capsys.readouterr().err
        time.sleep(0.06)
    assert capsys.readouterr().err == ""


def test_who_waits_from_a_moment_on_is_silent_from_then_on(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    ready = []
    with progress.counter("starting"), progress.waiting(once=lambda: bool(ready)):
        time.sleep(0.06)
        assert "starting: 0 s" in capsys.readouterr().err
        ready.append(True)
        time.sleep(0.03)
        capsys.readouterr()
        time.sleep(0.06)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_part_without_a_total_is_reported(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    with progress.counter("loading"):
        time.sleep(0.06)
    assert "loading: 0 s" in capsys.readouterr().err
    with progress.counter("bar", 3), progress.counter("inside"):
        time.sleep(0.06)
    assert "inside: 0 s" in capsys.readouterr().err


def test_a_line_is_said_once(capsys):
    for line in ("a line of this test", "another of this test", "a line of this test"):
        progress.say_once(line)
    assert capsys.readouterr().err == "a line of this test\nanother of this test\n"
