"""First come, first served, in batches that run to their end at one K."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from moe_edge.core.checks import check_count
from moe_edge.core.plug_in import register
from moe_edge.schedule.policy import (
    NOTHING,
    Decision,
    InOrderOfArrival,
    Job,
    Lane,
)


@register
@dataclasses.dataclass(frozen=True)
class Fifo(InOrderOfArrival):
    """All that wait, up to `max_batch`, at the highest floor among them.

    The next batch begins when the last of this one has ended.

    Attributes:
      max_batch: requests of a batch; 1 is the paper's latency policy (section 5.2).
    """

    name: ClassVar[str] = "fifo"
    SOURCE: ClassVar[str] = "MoE-Prism, section 6: baseline FIFO"
    max_batch: int = 8

    def __post_init__(self):
        check_count("max_batch", self.max_batch)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        return NOTHING if lane.running else as_one(lane.first(self.max_batch))


def as_one(jobs: Sequence[Job]) -> Decision:
    """Begins a batch at the highest floor of its jobs, the lowest K for all of them."""
    k = highest_floor(jobs)
    return Decision([(job.id, k) for job in jobs])


def highest_floor(jobs: Sequence[Job]) -> int | None:
    """Of jobs; None where K is no matter."""
    return max((job.floor for job in jobs if job.floor is not None), default=None)
