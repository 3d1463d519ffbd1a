"""The way from the host to the device: real, or slowed down to a stated rate.

On a machine without an accelerator host and device are the same memory, so a copy
costs almost nothing and overlap cannot be seen. An emulated link makes a transfer
last `latency_s + bytes / bytes_per_s` of real time. Results say so.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_edge.core.checks import ConfigError

# time.sleep overshoots by about 75 us.
_OVERSHOOT_S = 100e-6


class TransferLink:
    """A real link: a transfer takes as long as its copy. One thread uses it.

    Attributes:
      merges: whether blocks that lie next to one another in the store may travel as one
        transfer, with one latency.
      free_s: when it may take the next transfer, by `time.perf_counter`.
    """

    emulated = False
    merges = True
    free_s = 0.0

    def rest(self) -> None:
        """Returns when the link may take the next transfer."""

    def transfer(
        self, num_bytes: int, ready_s: float, copy: Callable, *args
    ) -> tuple[float, float, Any]:
        """Runs `copy(*args)`, which moves the bytes, as one transfer.

        Args:
          num_bytes: payload.
          ready_s: when the transfer was asked for, by `time.perf_counter`.
        Returns:
          Start and end by `time.perf_counter`, and what `copy` returned. The end may
          lie ahead: until then the block has not arrived (`wait_until`). Or behind: of
          a copy made late, when the link would have been done.
        """
        start_s = time.perf_counter()
        result = copy(*args)
        return start_s, time.perf_counter(), result

    def again(self) -> "TransferLink":
        """One like this, which has nothing to carry yet."""
        return TransferLink()

    def describe(self) -> dict:
        """What a results entry says about the link."""
        return {"emulated": False}


class EmulatedLink(TransferLink):
    """Throttles in real time.

    Transfers follow one another on a deadline clock: one begins when it was asked for
    or when the link becomes free, whichever is later, not when the thread happens to
    wake up, so that delays of waking do not add up. The copy runs at the beginning of
    the transfer's time, or later if nobody looked; only a copy that is slower than the
    link makes it longer.

    Nobody stays awake for the rest of that time but an engine that has nothing else
    to do: on a machine with few cores a thread that spins takes them from the model,
    which a real link does not.
    """

    emulated = True

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, merges: bool = True):
        """Raises ConfigError: rate <= 0, latency < 0, or one that is not finite."""
        if not 0 < bytes_per_s < math.inf:
            raise ConfigError(
                f"link rate must be a positive number of bytes per second, got "
                f"{bytes_per_s}"
            )
        if not 0 <= latency_s < math.inf:
            raise ConfigError(
                f"link latency must be 0 or more seconds, got {latency_s}"
            )
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.merges = merges
        self.free_s = self._last_s = 0.0

    def seconds(self, num_bytes: int) -> float:
        """How long a transfer occupies the link."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def transfer(
        self, num_bytes: int, ready_s: float, copy: Callable, *args
    ) -> tuple[float, float, Any]:
        start_s = max(ready_s, self.free_s)
        begun_s = time.perf_counter()
        result = copy(*args)
        copy_s = time.perf_counter() - begun_s
        self._last_s = max(self.seconds(num_bytes), copy_s)
        self.free_s = start_s + self._last_s
        return start_s, self.free_s, result

    def rest(self) -> None:
        # Rather early than late: a start before the link is free is dated later. Not
        # by whole transfers, though: who has begun cannot be overtaken.
        early_s = min(_OVERSHOOT_S, self._last_s / 2)
        left_s = self.free_s - time.perf_counter() - early_s
        if left_s > 0:
            time.sleep(left_s)

    def again(self) -> "EmulatedLink":
        return EmulatedLink(self.bytes_per_s, self.latency_s, self.merges)

    def describe(self) -> dict:
        return {
            "emulated": True,
            "bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s,
        }


class Turns:
    """What several links go through, one transfer after another, such as a disk.

    Attributes:
      lock: of whoever has his turn; free_s: when the last transfer ends.
    """

    def __init__(self):
        self.lock, self.free_s = threading.Lock(), 0.0


class SharedLink(TransferLink):
    """A link of one thread that takes turns with others."""

    def __init__(self, link: TransferLink, turns: Turns):
        self.emulated, self.describe = link.emulated, link.describe
        self.merges = link.merges
        self._link, self._turns = link, turns

    @property
    def free_s(self) -> float:
        """When it and what it shares are free."""
        return max(self._link.free_s, self._turns.free_s)

    def transfer(
        self, num_bytes: int, ready_s: float, copy: Callable, *args
    ) -> tuple[float, float, Any]:
        turns = self._turns
        with turns.lock:
            ready_s = max(ready_s, turns.free_s)
            found = self._link.transfer(num_bytes, ready_s, copy, *args)
            turns.free_s = found[1]
        return found


def wait_until(end_s: float) -> None:
    """Returns at `end_s` by `time.perf_counter`, awake for the last stretch."""
    left_s = end_s - time.perf_counter()
    if left_s > _OVERSHOOT_S:
        time.sleep(left_s - _OVERSHOOT_S)
    while time.perf_counter() < end_s:
        time.sleep(0)  # lets other Python threads run
