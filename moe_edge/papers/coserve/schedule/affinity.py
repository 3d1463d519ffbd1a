"""Requests go to where their expert is; what is resident is served first (ours)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from moe_edge.core.checks import check_from_zero, check_positive
from moe_edge.papers.coserve.schedule.coserve import CoServe
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob, JobGroup
from moe_edge.schedule.policy import Lane

LATE_LOADS = 2.0  # see docs/measurements.md: fewer make more late, more delay these


@dataclasses.dataclass(eq=False)
class Affinity(CoServe):
    """A request goes where its expert is or is queued, unless the wait there is worth
    some loads; a lane serves resident experts first, then preliminary ones.

    A second copy of an expert costs a load that delays all others which wait for the
    disk. So it is predicted to be there behind all of these, not after its own load.

    With a bound of waiting a lane looks ahead before each group: if the groups older
    than the one it would like could not all begin in time behind it, though they could
    without it, the oldest of these is next. Nobody can be in time where more loads are
    needed at once than fit into the bound. Who is late in any case lets the others go
    first, but only for LATE_LOADS loads: served oldest first, one late request after
    the other, each with a load of its own, would make all that follow late. A group is
    what waits when it begins; it is finished before another load can evict its expert.

    Attributes:
      max_wait_s: in a queue nobody waits longer than that and one group, if serving
        the oldest first would keep it: on one executor whose steps take what the costs
        say. Of several, others delay each other's loads. The next part of a request
        waits anew.
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
        self._load_s = [max(costs.load_s) for costs in self.costs]
        self._alone_s = [max(c.k_s) + max(c.b_s) for c in self.costs]
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

    def choose(self, lane: Lane, now_s: float) -> JobGroup:
        if self.max_wait_s == math.inf:
            return self._liked(lane)
        queue = lane.waiting
        if queue.begun is None:
            queue.begin(self._in_time(lane, now_s))
        return queue.begun

    def _liked(self, lane: Lane) -> JobGroup:
        """What is served if nobody is in a hurry."""
        queue = lane.waiting
        here = queue.runs.keys() & self.pools[lane.number].resident
        if here:
            return min((queue.runs[e] for e in here), key=_first_s)
        preliminary = (r for r in queue.in_order if r.expert not in self._subsequent)
        return next(preliminary, queue.first)

    def _in_time(self, lane: Lane, now_s: float) -> JobGroup:
        """The liked run, unless somebody older would then begin too late who need not;
        who is late in any case makes no other late."""
        liked, queue, n = self._liked(lane), lane.waiting, lane.number
        most_s = len(queue) * self._alone_s[n] + len(queue.in_order) * self._load_s[n]
        if now_s + most_s <= queue.first.since_s + self.max_wait_s:
            return liked  # all may begin in time in any order
        by_age = sorted(queue.in_order, key=_first_s)
        taken_s, begin_s, first = self._group_s(lane, liked), now_s, None
        for run in by_age:
            if run is liked:
                break
            late_s = begin_s - run.jobs[0].arrival_s - self.max_wait_s
            if late_s <= 0:
                first = first or run
                if late_s + taken_s > 0:
                    return first
                begin_s += self._group_s(lane, run)
            elif late_s + taken_s > LATE_LOADS * self._load_s[n]:
                return by_age[0]
        return liked

    def _group_s(self, lane: Lane, run: JobGroup) -> float:
        """Predicted seconds of all that waits in a run, its load included."""
        costs, expert, n = self.costs[lane.number], run.expert, len(run.jobs)
        batches = -(-n // costs.max_batch[expert])
        load_s = 0.0 if expert in self.pools[lane.number] else costs.load_s[expert]
        return costs.k_s[expert] * n + costs.b_s[expert] * batches + load_s


def _first_s(run: JobGroup) -> tuple[float, int]:
    """When its first job came."""
    return run.jobs[0].arrival_s, run.number
