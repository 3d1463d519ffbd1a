"""First come, first served: a queue a lane, up to `max_batch` requests together."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from moe_edge.core.checks import check_count
from moe_edge.schedule.policy import Decision, Job, Lane, SchedulePolicy

NOTHING = Decision()


def _at_once(n: int, m: int) -> float:
    return 0.0


@dataclasses.dataclass(frozen=True)
class Fifo(SchedulePolicy):
    """Jobs stay where they came in and join the running ones between two steps.

    Attributes:
      max_batch: jobs that a lane runs at a time; 1 serves one after another.
    """

    name: ClassVar[str] = "fifo"
    SOURCE: ClassVar[str] = "Prism, section IV-A: each server serves its own requests"
    max_batch: int = 1

    def __post_init__(self):
        check_count("max_batch", self.max_batch)

    def assign(self, job: Job, lanes: Sequence[Lane], now_s: float) -> int:
        return job.home

    def pick(self, lane: Lane, now_s: float) -> Decision:
        free = self.max_batch - len(lane.running)
        if free <= 0 or not lane.waiting:
            return NOTHING
        first = itertools.islice(lane.waiting, free)
        return Decision([(job.id, None) for job in first])


@dataclasses.dataclass(frozen=True)
class FifoToIdle(Fifo):
    """As Fifo, but a busy lane passes a new job on to an idle one, if there is any.

    Attributes:
      reach_s: seconds of a message from one lane to another; the nearest idle lane is
        chosen, the first of equals.
    """

    name: ClassVar[str] = "fifo_to_idle"
    SOURCE: ClassVar[str] = "Prism, table I: MoE-Infinity with load balancing"
    reach_s: Callable[[int, int], float] = _at_once

    def assign(self, job: Job, lanes: Sequence[Lane], now_s: float) -> int:
        if lanes[job.home].idle:
            return job.home
        idle = [lane.number for lane in lanes if lane.idle]
        return min(idle, key=partial(self.reach_s, job.home), default=job.home)
