import time

import pytest

from moe_edge.core import progress
from moe_edge.core.progress import EVERY_S
from tests.support.progress_lines import without_progress


@pytest.fixture
def lines(capsys):
    """The lines that were written since the last call."""
    return lambda: capsys.readouterr().err.splitlines()


def test_without_a_terminal_lines_say_how_far_it_is(progress_clock, lines):
    assert EVERY_S == 10
    for _ in progress.progress(range(3), "windows"):
        progress_clock.passes(14)
    assert lines() == [
        *("windows: 0/3, 10 s", "windows: 1/3, 20 s", "windows: 2/3, 30 s"),
        "windows: 2/3, 40 s",
    ]
    with progress.counter("loading"):  # nothing to count
        progress_clock.passes(10)
    assert lines() == ["loading: 10 s"]


def test_other_tests_find_the_lines_beside_progress(progress_clock, capsys):
    with progress.counter("cluster"):
        progress_clock.passes(20)
        with progress.counter("files of experts, checked", 1234):
            progress_clock.passes(10)
            progress.say("error: scheduler ended: 4 of 5, 30 s: too late")
            progress_clock.passes(10)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 5
    wanted = "error: scheduler ended: 4 of 5, 30 s: too late\n"
    assert without_progress(said) == wanted


def test_other_tests_leave_out_that_there_is_no_cuda_driver():
    """As XLA logs it, if JAX's CUDA plugin is installed."""
    logged = (
        "WARNING: All log messages before absl::InitializeLog() is called are written "
        "to STDERR\n"
        "I0000 00:00:1795799565.103807   10113 cudart_stub.cc:31] Could not find cuda "
        "drivers on your machine, GPU will not be used.\n"
    )
    failed = logged.replace("I0000", "E0000").splitlines(keepends=True)[1]
    assert without_progress(f"one\n{logged}{failed}two\n") == f"one\n{failed}two\n"


def test_a_thread_looks_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    until_s, found = time.monotonic() + 60, ""
    with progress.counter("loading"):
        while not found and time.monotonic() < until_s:
            time.sleep(0.001)
            found = capsys.readouterr().err
    assert found.startswith("loading: ")


def test_a_short_or_silent_run_says_nothing(progress_clock, lines):
    for _ in progress.progress([1, 2], "x"):
        progress_clock.passes(4)
    for _ in progress.progress([1], "x", shown=False):
        progress_clock.passes(30)
    assert lines() == []


def test_on_a_terminal_a_bar_is_drawn(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress.progress([1, 2], "windows")) == [1, 2]
    assert "windows" in capsys.readouterr().err


def test_only_the_innermost_counter_is_reported(progress_clock, lines):
    with progress.counter("outer"):
        with progress.counter("inner", 5) as count:
            count(2)
            progress_clock.passes(20)
        assert lines() == ["inner: 2/5, 10 s", "inner: 2/5, 20 s"]
        progress_clock.passes(20)
    assert lines() == ["outer: 30 s", "outer: 40 s"]


def test_a_line_waits_while_something_else_is_said(progress_clock, lines):
    with progress.counter("outer"):
        for _ in range(5):
            progress_clock.passes(9)
            progress.said()
        assert lines() == []
        progress_clock.passes(10)
    assert lines() == ["outer: 55 s"]


def test_short_parts_one_after_another_are_not_silent(progress_clock, lines):
    with progress.counter("outer"):
        for number in range(15):
            with progress.counter(f"part {number}"):
                progress_clock.passes(2)
    assert lines() == ["part 4: 2 s", "part 9: 2 s", "part 14: 2 s"]


def test_who_waits_is_silent_and_what_it_does_is_not(progress_clock, lines):
    with progress.counter("serve"), progress.waiting():
        progress_clock.passes(30)
        assert lines() == []
        with progress.counter("loading"):
            progress_clock.passes(10)
        assert lines() == ["loading: 10 s"]
        progress_clock.passes(30)
    assert lines() == []


def test_who_waits_from_a_moment_on_is_silent_from_then_on(progress_clock, lines):
    ready = []
    with progress.counter("starting"), progress.waiting(once=lambda: bool(ready)):
        progress_clock.passes(10)
        assert lines() == ["starting: 10 s"]
        ready.append(True)
        progress_clock.passes(30)
    assert lines() == []


def test_on_a_terminal_a_part_without_a_total_is_reported(
    progress_clock, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.counter("loading"):
        progress_clock.passes(10)
    assert "loading: 10 s" in capsys.readouterr().err
    with progress.counter("bar", 3), progress.counter("inside"):
        progress_clock.passes(10)
    assert "inside: 10 s" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_counter_interrupted_as_it_begins_reports_nothing(monkeypatch, moment):
    """Ctrl-C in a notebook, whose process goes on."""
    begin, reporter = progress._Reporter.begin, progress._Reporter()
    monkeypatch.setattr(progress, "_REPORTER", reporter)

    def interrupted(reporter, task):
        if moment == "after":
            begin(reporter, task)
        raise KeyboardInterrupt

    monkeypatch.setattr(progress._Reporter, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt), progress.counter("loading"):
        pass
    assert not reporter._tasks and reporter._ended is None


def test_a_line_is_said_once(capsys):
    for line in ("a line of this test", "another of this test", "a line of this test"):
        progress.say_once(line)
    assert capsys.readouterr().err == "a line of this test\nanother of this test\n"
