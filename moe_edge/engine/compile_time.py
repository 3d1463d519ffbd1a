"""When this thread traced, lowered and compiled programs, to keep it out of speeds.

JAX reports the length of each such step as it ends. Steps lie within each other (a
program that calls another one is traced around it), so what counts is their union.
"""

import threading
import time

import jax

_EVENTS = "/jax/core/compile/"
_local = threading.local()


def _note(event: str, seconds: float, **_) -> None:
    clock = getattr(_local, "clock", None)
    if clock is not None and event.startswith(_EVENTS):
        clock.add(seconds)


jax.monitoring.register_event_duration_secs_listener(_note)


class CompileClock:
    """Listens to what the thread compiles while it is entered; any number of times."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []  # disjoint, in order

    def __enter__(self) -> "CompileClock":
        self._outer = getattr(_local, "clock", None)
        _local.clock = self
        return self

    def __exit__(self, *_) -> None:
        _local.clock = self._outer

    def add(self, seconds: float) -> None:
        """Something that took so long has just ended."""
        end_s = time.perf_counter()
        start_s = end_s - seconds
        # What began later lies within it; at most the last one reaches into it.
        while self._spans and self._spans[-1][1] > start_s:
            start_s = min(start_s, self._spans.pop()[0])
        self._spans.append((start_s, end_s))

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds of compilation between two times of `time.perf_counter()`."""
        return sum(
            max(0.0, min(end_s, end) - max(start_s, start))
            for start, end in self._spans
        )
