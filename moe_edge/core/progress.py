"""How far a long run is: lines, or a bar on a terminal, else one every ten seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

EVERY_S = 10.0


def say(line: str) -> None:
    """Progress goes to stderr: stdout ends with the script's JSON line."""
    print(line, file=sys.stderr, flush=True)


def progress(
    items: Iterable, name: str, total: int | None = None, shown: bool = True
) -> Iterator:
    """Yields the items and reports on stderr how many are done.

    Args:
      name: what is done, such as "windows".
      total: how many items; None: `len(items)`.
      shown: False: silent.
    """
    total = len(items) if total is None else total
    with counter(name, total, shown) as count:
        for item in items:
            yield item
            count(1)


@contextlib.contextmanager
def counter(name: str, total: int | None = None, shown: bool = True):
    """Yields a function that is told how many more of `total` are done.

    The lines come from a thread, so that one long item, or a part of a run that counts
    nothing (`total` None), is reported too.
    """
    if not shown:
        yield lambda more=1: None
        return
    if sys.stderr.isatty():
        bar = tqdm(total=total, desc=name, leave=False, disable=total is None)
        try:
            yield bar.update
        finally:
            bar.close()
        return
    done, ended, started = [0], threading.Event(), time.monotonic()

    def count(more: int = 1) -> None:
        done[0] += more

    def report() -> None:
        while not ended.wait(EVERY_S):
            share = "" if total is None else f" {done[0]}/{total},"
            seconds = time.monotonic() - started
            print(f"{name}:{share} {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
