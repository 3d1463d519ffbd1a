"""Batches that wait until they are full, and run to their end at one K."""

import dataclasses
from typing import ClassVar

from moe_edge.core.checks import check_from_zero
from moe_edge.core.plug_in import register
from moe_edge.schedule.fifo import Fifo, as_one
from moe_edge.schedule.policy import NOTHING, Decision, Lane


@register
@dataclasses.dataclass(frozen=True)
class FullBatch(Fifo):
    """As Fifo, but a batch begins only once it is full or its first has waited enough.

    Full also means that there is no room for the next one.

    Attributes:
      max_wait_s: after this a batch begins as it is. The paper names no such bound; its
        last batch would never begin.
    """

    name: ClassVar[str] = "full_batch"
    SOURCE: ClassVar[str] = "MoE-Prism, section 6: baseline FullBatch"
    max_wait_s: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_from_zero("max_wait_s", self.max_wait_s)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        if lane.running or not lane.waiting:
            return NOTHING
        batch = lane.first(self.max_batch)
        all_of_them = len(batch) == len(lane.waiting) < self.max_batch
        flush_s = lane.waiting[0].arrival_s + self.max_wait_s
        if all_of_them and now_s < flush_s:
            return Decision(again_s=flush_s)
        return as_one(batch)
