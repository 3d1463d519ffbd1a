"""Continuous batching: whoever comes joins between two steps, at a K of its own."""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import check_count
from moe_edge.core.plug_in import register
from moe_edge.schedule.policy import (
    NOTHING,
    Decision,
    InOrderOfArrival,
    Lane,
)


@register
@dataclasses.dataclass(frozen=True)
class Continuous(InOrderOfArrival):
    """First come, first served where it came in; every row at its own floor.

    A request for which there is no room yet is not passed by smaller ones.

    Attributes:
      max_batch: jobs that a lane runs at a time; 1 serves one after another.
    """

    name: ClassVar[str] = "continuous"
    SOURCE: ClassVar[str] = "ours, after Orca's iteration-level scheduling"
    max_batch: int = 8

    def __post_init__(self):
        check_count("max_batch", self.max_batch)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        if not lane.waiting:
            return NOTHING
        first = lane.first(self.max_batch - len(lane.running))
        return Decision([(job.id, job.floor) for job in first]) if first else NOTHING
