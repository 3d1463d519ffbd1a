"""Time of a run: seconds from its start."""

import time


class WallClock:
    """Real time. `time.perf_counter` is the one counter behind all of ours."""

    def __init__(self):
        self._start_s = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start_s

    def at(self, counter_s: float) -> float:
        """Run time of an instant that was read from `time.perf_counter`."""
        return counter_s - self._start_s
