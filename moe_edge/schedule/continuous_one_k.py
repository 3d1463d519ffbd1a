"""The control of continuous batching: one K for all rows, as other engines have it."""

import dataclasses
from typing import ClassVar

from moe_edge.core.plug_in import register
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.fifo import highest_floor
from moe_edge.schedule.policy import Decision, Lane


@register
@dataclasses.dataclass(frozen=True)
class ContinuousOneK(Continuous):
    """As Continuous, every row at the highest floor of those that run now.

    A prompt keeps the K with which it began; its row changes with its first token.
    """

    name: ClassVar[str] = "continuous_one_k"
    SOURCE: ClassVar[str] = "control of ours: what a K a row is worth"

    def pick(self, lane: Lane, now_s: float) -> Decision:
        first = lane.first(self.max_batch - len(lane.running))
        k = highest_floor([*lane.running, *first])
        changed = {job.id: k for job in lane.running if job.made and job.k != k}
        return Decision([(job.id, k) for job in first], changed)
