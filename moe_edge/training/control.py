"""What lets a long run be watched, paused and stopped: clock, signals, records."""

import json
import signal
import time
from pathlib import Path

from moe_edge.core.progress import say


class Clock:
    """Minutes of this process, its deadline, and what is due from time to time."""

    def __init__(self, max_minutes: float | None):
        self._start, self._max = time.monotonic(), max_minutes
        self._last: dict[str, float] = {}

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._start) / 60

    @property
    def left(self) -> float | None:
        return None if self._max is None else self._max - self.minutes

    def due(self, name: str, every: float) -> bool:
        if self.minutes - self._last.setdefault(name, 0.0) < every:
            return False
        self._last[name] = self.minutes
        return True


class StopOnSignal:
    """Turns SIGTERM and SIGINT into a flag while a run lasts."""

    def __enter__(self):
        self.stopped = False
        self._old = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._old[number] = signal.signal(number, self._stop)
            except ValueError:  # not in the main thread: signals are not ours
                pass
        return self

    def _stop(self, number, frame):
        say(f"signal {number}: saving and stopping")
        self.stopped = True

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)


def append_record(path: Path, record: dict) -> None:
    """Adds a line to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def short(record: dict) -> str:
    """A record as one line of progress."""
    return " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
        for k, v in record.items()
    )
