"""Requests for experts: where they go, in which order, in which batches (CoServe).

A batch of n requests of one expert takes K n + B seconds, and its load if the expert
is not resident. Policies see pools as what is resident, and costs an executor.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from moe_edge.papers.coserve.memory.pool import Pool
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob, JobGroup, RunQueue
from moe_edge.schedule.policy import NOTHING, Decision, Lane, Scheduler


class ExpertCosts(NamedTuple):
    """What experts cost on one executor: lists, one number an expert.

    Attributes:
      k_s, b_s: a batch of n takes k_s n + b_s.
      load_s: of a load from where experts come from as a rule.
      max_batch: requests of a batch, what memory allows and what pays.
    """

    k_s: Sequence[float]
    b_s: Sequence[float]
    load_s: Sequence[float]
    max_batch: Sequence[int]

    def batch_s(self, expert: int, n: int) -> float:
        return self.k_s[expert] * n + self.b_s[expert]

    def item_s(self, expert: int) -> float:
        """Of a request in a full batch."""
        return self.k_s[expert] + self.b_s[expert] / self.max_batch[expert]


@dataclasses.dataclass(eq=False)
class InTurn(Scheduler):
    """Requests go round the lanes; each serves them as they come.

    A batch is the first requests of the queue that need one expert.

    Attributes:
      costs, pools: of each lane's executor.
      follow: preliminary expert -> subsequent one.
      until_s: when each lane's batch should end, while it runs; of CoServe and those
        after it.
    """

    name: ClassVar[str] = "in_turn"
    SOURCE: ClassVar[str] = "CoServe, section 5: Samba-CoE, Parallel, CoServe None, EM"
    costs: Sequence[ExpertCosts]
    pools: Sequence[Pool]
    follow: Mapping[int, int]

    def __post_init__(self):
        self.max_batch = max(max(costs.max_batch) for costs in self.costs)
        self.until_s = [0.0] * len(self.pools)
        self._turn = 0

    def queue(self, number: int) -> RunQueue:
        state = self.pools[number].state
        return RunQueue(state["waiting_E"], state["coming_E"], self.follow)

    def assign(self, job: ExpertJob, lanes: Sequence[Lane], now_s: float) -> int:
        while True:  # an expert fits into one of the pools at least
            number = self._turn
            self._turn = (number + 1) % len(lanes)
            if self.pools[number].fits(job.expert):
                return number

    def choose(self, lane: Lane, now_s: float) -> JobGroup:
        """The run that a lane serves next."""
        return lane.waiting.first

    def pick(self, lane: Lane, now_s: float) -> Decision:
        if lane.running or not lane.waiting:
            return NOTHING
        run, costs = self.choose(lane, now_s), self.costs[lane.number]
        expert = run.expert
        jobs = itertools.islice(run.jobs, costs.max_batch[expert])
        admit = [(job.id, None) for job in jobs]
        load_s = 0.0 if expert in self.pools[lane.number] else costs.load_s[expert]
        self.until_s[lane.number] = now_s + load_s + costs.batch_s(expert, len(admit))
        return Decision(admit)

    def done(self, job: ExpertJob, now_s: float) -> Sequence[ExpertJob]:
        """The same request at its next expert, if it goes on."""
        if job.follow is None:
            return ()
        return [
            ExpertJob(
                job.id,
                home=job.home,
                arrival_s=now_s,
                deadline_s=job.deadline_s,
                expert=job.follow,
            )
        ]


@dataclasses.dataclass(eq=False)
class Arranged(InTurn):
    """As InTurn, but a request goes right behind the last one of its expert."""

    name: ClassVar[str] = "arranged"
    SOURCE: ClassVar[str] = "CoServe, sections 4.2 and 5.3: CoServe EM+RA"

    def place(self, job: ExpertJob, lane: Lane, now_s: float) -> int:
        return lane.waiting.behind(job.expert)


@dataclasses.dataclass(eq=False)
class CoServe(Arranged):
    """As Arranged, but a request goes where the longest queue stays shortest.

    Of lanes that are equal in that, where it adds least; then the shortest.
    """

    name: ClassVar[str] = "coserve"
    SOURCE: ClassVar[str] = "CoServe (ASPLOS 2025), section 4.2"

    def assign(self, job: ExpertJob, lanes: Sequence[Lane], now_s: float) -> int:
        left_s = self.left_s(lanes, now_s)
        longest_s = max(left_s)
        best, number = None, 0
        for n, lane in enumerate(lanes):
            if not self.pools[n].fits(job.expert):
                continue
            added_s, _ = self.added_s(job.expert, lane)
            total_s = left_s[n] + added_s
            key = max(longest_s, total_s), added_s, total_s
            if best is None or key < best:
                best, number, job.added_s = key, n, added_s
        return number

    def left_s(self, lanes: Sequence[Lane], now_s: float) -> list[float]:
        """Predicted seconds until each lane has served what it has."""
        return [
            lane.stepping * max(until_s - now_s, 0.0) + lane.waiting.added_s
            for lane, until_s in zip(lanes, self.until_s, strict=True)
        ]

    def added_s(self, expert: int, lane: Lane) -> tuple[float, float]:
        """Predicted seconds that one more request of an expert adds to a lane; and of
        these a load's, none where the expert is or is queued."""
        costs = self.costs[lane.number]
        if expert in lane.waiting.runs:
            return costs.k_s[expert], 0.0
        load_s = 0.0 if expert in self.pools[lane.number] else costs.load_s[expert]
        return costs.k_s[expert] + costs.b_s[expert] + load_s, load_s
