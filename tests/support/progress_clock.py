"""A clock for what reports progress: time passes when a test says so."""

from moe_edge.core import progress


class ProgressClock:
    """The clock of a reporter of its own, which looks every second of it."""

    def __init__(self):
        self._now_s = 0.0
        self.reporter = progress._Reporter(self)

    def __call__(self) -> float:
        return self._now_s

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self._now_s += 1
            self.reporter.look()
