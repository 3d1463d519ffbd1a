"""Requests go to where their expert is; what is resident is served first (ours)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from moe_edge.core.checks import check_from_zero, check_positive
from moe_edge.schedule.coserve import CoServe
from moe_edge.schedule.policy import Lane
from moe_edge.schedule.run_queue import ExpertJob, Run


@dataclasses.dataclass(eq=False)
class Affinity(CoServe):
    """A request goes where its expert is or is queued, unless the wait there is worth
    some loads; a lane serves resident experts first, then preliminary ones.

    A second copy of an expert costs a load that delays all others which wait for the
    disk. So it is predicted to be there behind all of these, not after its own load.

    With a bound of waiting a group is what waits when it begins. It is finished before
    another load can evict its expert; without one a resident expert is next anyway.

    Attributes:
      max_wait_s: who has waited that long in a queue is next, the oldest first. Where
        requests come faster than they are served, all wait longer.
      patience_loads: longer queue, in loads of the expert, for which a request still
        goes where its expert is.
      one_disk: loads wait for each other.
    """

    name: ClassVar[str] = "affinity"
    SOURCE: ClassVar[str] = "ours"
    max_wait_s: float = math.inf
    patience_loads: float = 4.0
    one_disk: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.max_wait_s != math.inf:
            check_from_zero("max_wait_s", self.max_wait_s)
        check_positive("patience_loads", self.patience_loads)
        self._subsequent = frozenset(self.follow.values())

    def assign(self, job: ExpertJob, lanes: Sequence[Lane], now_s: float) -> int:
        expert, left_s = job.expert, self.left_s(lanes, now_s)
        disk_s = sum(lane.waiting.load_s for lane in lanes) if self.one_disk else 0.0
        best, number = None, 0
        for n, lane in enumerate(lanes):
            if not self.pools[n].fits(expert):
                continue
            added_s, load_s = self.added_s(expert, lane)
            total_s = own_s = left_s[n] + added_s
            if load_s:
                total_s = max(own_s, disk_s + added_s)
                total_s += (self.patience_loads - 1) * load_s
            key = total_s, load_s, own_s
            if best is None or key < best:
                best, number = key, n
                job.added_s, job.load_s = added_s, load_s
        return number

    def choose(self, lane: Lane, now_s: float) -> Run:
        if self.max_wait_s == math.inf:
            return self._liked(lane)
        queue = lane.waiting
        if queue.begun is None:
            waited_s = now_s - queue.oldest.arrival_s
            late = waited_s >= self.max_wait_s
            queue.begin(queue.oldest.run if late else self._liked(lane))
        return queue.begun

    def _liked(self, lane: Lane) -> Run:
        """What is served if nobody is in a hurry."""
        queue = lane.waiting
        here = queue.runs.keys() & self.pools[lane.number].resident
        if here:
            return min((queue.runs[e] for e in here), key=_first_s)
        preliminary = (r for r in queue.in_order if r.expert not in self._subsequent)
        return next(preliminary, queue.first)


def _first_s(run: Run) -> tuple[float, int]:
    """When its first job came."""
    return run.jobs[0].arrival_s, run.number
