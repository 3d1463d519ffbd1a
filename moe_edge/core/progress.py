"""How far a long run is: no command is silent for more than ten seconds.

`counter` names what is being done, inside of each other where that helps. Whenever
nothing was said for EVERY_S, a thread writes one line about the innermost one: its
name, how many are done, and for how long. On a terminal those that know their total
draw a bar. `commands/common.py` opens the outermost one, named after the command.
"""

import contextlib
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
    """

    def __init__(self, name: str | None, total: int | None, applies=lambda: True):
        self.name, self.total, self.done = name, total, 0
        self.applies, self.started_s = applies, time.monotonic()
        self.bar = None
        if name is not None and total is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=name, leave=False)

    def count(self, more: int = 1) -> None:
        self.done += more
        if self.bar is not None:
            self.bar.update(more)

    @property
    def line(self) -> str:
        share = "" if self.total is None else f" {self.done}/{self.total},"
        return f"{self.name}:{share} {time.monotonic() - self.started_s:.0f} s"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Reporter:
    """The tasks that run now, and the thread that reports the innermost one."""

    def __init__(self):
        self.said_s = time.monotonic()
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []
        self._ended: threading.Event | None = None  # of the thread; None: none runs

    def begin(self, task: _Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._ended is None:
                self.said_s, self._ended = time.monotonic(), threading.Event()
                thread = threading.Thread(
                    target=self._report, args=(self._ended,), name="progress"
                )
                thread.daemon = True
                thread.start()

    def end(self, task: _Task) -> None:
        with self._lock:
            self._tasks.remove(task)
            if not self._tasks:
                self._ended.set()
                self._ended = None
        task.close()

    def _report(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._left_s(), EVERY_S / 10)):
            with self._lock:
                if self._left_s() <= 0 and not ended.is_set():
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it
                        self._show()
                    self.said_s = time.monotonic()

    def _show(self) -> None:
        task = next((one for one in self._tasks[::-1] if one.applies()), None)
        bars = [one.bar for one in self._tasks if one.bar is not None]
        if task is None or task.name is None:
            return
        if task.bar is not None:
            task.bar.refresh()  # its seconds go on while one item is long
        elif bars:
            bars[0].write(task.line, file=sys.stderr)  # between the bars
        else:
            print(task.line, file=sys.stderr, flush=True)

    def _left_s(self) -> float:
        """How long nothing has to be said."""
        return self.said_s + EVERY_S - time.monotonic()


_REPORTER = _Reporter()


def say(line: str) -> None:
    """Progress goes to stderr: stdout ends with the script's JSON line."""
    print(line, file=sys.stderr, flush=True)
    said()


def said() -> None:
    """Notes that a person has just seen something: the next line can wait."""
    _REPORTER.said_s = time.monotonic()


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
    _REPORTER.begin(task)
    try:
        yield task
    finally:
        _REPORTER.end(task)
