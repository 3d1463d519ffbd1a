"""Continuous batching whose rows use what is free for quality, and no more."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from moe_edge.core.checks import check_count
from moe_edge.core.plug_in import register
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.policy import Decision, Lane
from moe_edge.schedule.request import Request

PARTS = 4  # in how many parts what is free is taken back for a deadline


@register
@dataclasses.dataclass(frozen=True)
class Elastic(Continuous):
    """As Continuous, a row's K between its floor and the model's own.

    While somebody waits, rows run at their floors. Else the way from floor to own K is
    gone as far as slots are free: all of it with one row, none with all slots in use;
    and only so far that every row with a deadline gets its tokens in time. A prompt
    keeps the K with which it began.

    Attributes:
      own_k: experts a token of the model itself.
      costs: seconds of steps, by rows and K.
    """

    name: ClassVar[str] = "elastic"
    SOURCE: ClassVar[str] = "ours"
    own_k: int = dataclasses.field(kw_only=True)
    costs: StepCosts = dataclasses.field(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_count("own_k", self.own_k)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        first = lane.first(self.max_batch - len(lane.running))
        rows = [*lane.running, *first]
        if not rows:
            return Decision()
        share = 0.0
        if len(first) == len(lane.waiting):
            used = (len(rows) - 1) / max(self.max_batch - 1, 1)
            share = self._in_time(rows, 1 - used, now_s)
        admit = [(job.id, self._k(job, share)) for job in first]
        decoding = [(job, self._k(job, share)) for job in lane.running if job.made]
        return Decision(admit, {job.id: k for job, k in decoding if k != job.k})

    def _k(self, job: Any, share: float) -> int:
        return job.floor + int(share * max(self.own_k - job.floor, 0))

    def _in_time(self, rows: Sequence[Request], share: float, now_s: float) -> float:
        """The largest part of a share with which no row misses its deadline."""
        step_s = min(
            ((j.deadline_s - now_s) / j.left for j in rows if j.deadline_s is not None),
            default=math.inf,
        )
        for part in range(PARTS, 0, -1):
            less = share * part / PARTS
            k = sum(self._k(job, less) for job in rows) / len(rows)
            if self.costs.decode_s(len(rows), k) <= step_s:
                return less
        return 0.0
