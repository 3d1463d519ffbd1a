"""What happens to requests for experts, in order: queues, pools and tier as one thing.

Engine and simulator call it with the time and do what it says: load, compute, throw
away. It has no clock and no thread, so the same calls give the same loads. Whoever has
threads holds one lock around each call.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.schedule.loop import RequestLoop


class Batch(NamedTuple):
    """A step of a lane.

    Attributes:
      lane, expert, jobs: who judges what.
      tier: where the expert has to be loaded from, disk or host; None: it is resident.
      leaving: experts that leave the pool for it, before it is loaded.
      dropped: those that leave memory by that: `leaving`, or what leaves the tier.
    """

    lane: int
    expert: int
    jobs: Sequence[ExpertJob]
    tier: str | None
    leaving: Sequence[int]
    dropped: Sequence[int]


class ExpertServing:
    """Requests from arrival to the end of their last part.

    Attributes:
      setup: what it began with, as it is now; loop: the queues.
      decisions_s: measured seconds of each assignment and each pick.
      management_s: measured seconds of pools and tier.
    """

    def __init__(self, setup: Setup):
        self.setup, self.loop = setup, RequestLoop(setup.policy, len(setup.pools))
        self.decisions_s: list[float] = []
        self.management_s = 0.0

    def come(self, job: ExpertJob, now_s: float) -> int | None:
        """A request, or its next part, enters a queue: the lane, if that rests."""
        started_s = time.perf_counter()
        lane = self.loop.arrive(job, now_s)
        rests = lane is not None and self.loop.admit(job, lane, now_s)
        self.decisions_s.append(time.perf_counter() - started_s)
        return lane if rests else None

    def begin(self, lane: int, now_s: float) -> Batch | None:
        """The next batch of a lane that rests; None: it has nothing to do."""
        started_s = time.perf_counter()
        jobs = self.loop.begin_step(lane, now_s)
        decided_s = time.perf_counter()
        if not jobs:
            return None
        expert, pool, tier = jobs[0].expert, self.setup.pools[lane], None
        leaving: Sequence[int] = ()
        dropped: Sequence[int] = ()
        if expert not in pool:
            leaving = pool.enter(expert)
            tier, dropped = self._from(expert, leaving)
        pool.touch(expert, now_s)
        self.decisions_s.append(decided_s - started_s)
        self.management_s += time.perf_counter() - decided_s
        return Batch(lane, expert, list(jobs), tier, leaving, dropped)

    def end(self, batch: Batch, now_s: float) -> Sequence[ExpertJob]:
        """A batch is judged; each job's `follow` says whether it goes on.

        Returns:
          the next parts of its requests, which are to `come` now.
        """
        return self.loop.end_step(batch.lane, now_s, batch.jobs)

    def fail(self, batch: Batch, now_s: float) -> None:
        """A batch's expert could not be loaded: it is in no pool; its requests end."""
        self.setup.pools[batch.lane].leave(batch.expert)
        self.loop.end_step(batch.lane, now_s, (), batch.jobs)

    def _from(self, expert: int, leaving: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Where an expert comes from, what left for it goes to the tier: who went."""
        tier = self.setup.tier
        if tier is None:
            return "disk", leaving
        found = tier.take(expert)
        return "host" if found else "disk", tier.keep(leaving)
