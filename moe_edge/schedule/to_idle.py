"""A busy lane passes new requests on: MoE-Infinity with load balancing."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.policy import Job, Lane


def _at_once(n: int, m: int) -> float:
    return 0.0


@dataclasses.dataclass(frozen=True)
class ToIdle(Continuous):
    """As Continuous, but a job goes to an idle lane, if its own is not and any is.

    Attributes:
      reach_s: seconds of a message from one lane to another; the nearest idle lane is
        chosen, the first of equals.
    """

    name: ClassVar[str] = "to_idle"
    SOURCE: ClassVar[str] = "Prism, table I: MoE-Infinity with load balancing"
    reach_s: Callable[[int, int], float] = _at_once

    def assign(self, job: Job, lanes: Sequence[Lane], now_s: float) -> int:
        if lanes[job.home].idle:
            return job.home
        idle = [lane.number for lane in lanes if lane.idle]
        return min(idle, key=partial(self.reach_s, job.home), default=job.home)
