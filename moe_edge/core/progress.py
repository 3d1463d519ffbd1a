"""How far a long run is: no command is silent for more than ten seconds.

`counter` names what is being done, inside of each other where that helps. Whenever
nothing was said for EVERY_S, a thread writes one line about the innermost one: its
name, how many are done, and for how long. On a terminal those that know their total
draw a bar. `commands/common.py` opens the outermost one, named after the command.
"""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

EVERY_S = 10.0


class _Task:
    """What one `counter` or `waiting` reports.

    Attributes:
      name: None: it reports nothing.
      applies: whether it does, now.
      started_s: by the reporter's clock.
    """

    def __init__(self, name: str | None, total: int | None, applies=lambda: True):
        self.name, self.total, self.done = name, total, 0
        self.applies, self.started_s = applies, 0.0
        self.bar = None
        if name is not None and total is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=name, leave=False)

    def count(self, more: int = 1) -> None:
        self.done += more
        if self.bar is not None:
            self.bar.update(more)

    def line(self, now_s: float) -> str:
        share = "" if self.total is None else f" {self.done}/{self.total},"
        return f"{self.name}:{share} {now_s - self.started_s:.0f} s"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Reporter:
    """The tasks that run now, and the thread that reports the innermost one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.said_s = clock, clock()
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []
        self._ended: threading.Event | None = None  # of the thread; None: none runs

    def begin(self, task: _Task) -> None:
        with self._lock:
            task.started_s = self.clock()
            self._tasks.append(task)
            if self._ended is None:
                self.said_s, self._ended = self.clock(), threading.Event()
                thread = threading.Thread(
                    target=self._report, args=(self._ended,), name="progress"
                )
                thread.daemon = True
                thread.start()

    def end(self, task: _Task) -> None:
        with self._lock:
            if task in self._tasks:  # Ctrl-C may have come before it was
                self._tasks.remove(task)
            if not self._tasks and self._ended is not None:
                self._ended.set()
                self._ended = None
        task.close()

    def _report(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._left_s(), EVERY_S / 10)):
            self.look()

    def look(self) -> None:
        """Writes a line, if it is time for one."""
        with self._lock:
            if self._left_s() <= 0:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it
                    self._show()
                self.said_s = self.clock()

    def _show(self) -> None:
        task = next((one for one in self._tasks[::-1] if one.applies()), None)
        bars = [one.bar for one in self._tasks if one.bar is not None]
        if task is None or task.name is None:
            return
        line = task.line(self.clock())
        if task.bar is not None:
            task.bar.refresh()  # its seconds go on while one item is long
        elif bars:
            bars[0].write(line, file=sys.stderr)  # between the bars
        else:
            print(line, file=sys.stderr, flush=True)

    def _left_s(self) -> float:
        """How long nothing has to be said."""
        return self.said_s + EVERY_S - self.clock()


_REPORTER = _Reporter()


def say(line: str) -> None:
    """Progress goes to stderr: stdout ends with the script's JSON line."""
    print(line, file=sys.stderr, flush=True)
    said()


@functools.cache
def say_once(line: str) -> None:
    """As `say`, the first time in this process."""
    say(line)


def said() -> None:
    """Notes that a person has just seen something: the next line can wait."""
    _REPORTER.said_s = _REPORTER.clock()


def progress(
    items: Iterable, name: str, total: int | None = None, shown: bool = True
) -> Iterator:
    """Yields the items and reports on stderr how many are done.

    Args:
      name: what is done, such as "windows".
      total: how many items; None: `len(items)`.
      shown: False: not reported.
    """
    total = len(items) if total is None else total
    with counter(name, total, shown) as count:
        for item in items:
            yield item
            count(1)


@contextlib.contextmanager
def counter(
    name: str, total: int | None = None, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Yields a function that is told how many more of `total` are done.

    Args:
      total: None: of a part of a run that counts nothing.
      shown: False: not reported; an outer one is.
    """
    if not shown:
        yield lambda more=1: None
        return
    with _running(_Task(name, total)) as task:
        yield task.count


@contextlib.contextmanager
def waiting(once: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A part of a run that waits for others, such as a server for its clients: only
    what is counted inside is reported.

    Args:
      once: whether it waits already; until then, outer counters are reported.
    """
    with _running(_Task(None, None, once)):
        yield


@contextlib.contextmanager
def _running(task: _Task) -> Iterator[_Task]:
    try:
        _REPORTER.begin(task)  # within: Ctrl-C may come before it has returned
        yield task
    finally:
        _REPORTER.end(task)
