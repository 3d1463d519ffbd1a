"""How the time of a computation grows with its size."""

import time
from collections.abc import Callable


def times_longer(run: Callable, small, large, rounds: int = 3) -> float:
    """CPU time of `run(large)` over that of `run(small)`, the least of some rounds."""

    def least(given) -> float:
        times_s = []
        for _ in range(rounds):
            started_s = time.process_time()
            run(given)
            times_s.append(time.process_time() - started_s)
        return max(min(times_s), 1e-4)

    return least(large) / least(small)
