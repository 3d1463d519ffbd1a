"""Decisions of a run, and a policy that only repeats them: what does deciding cost?"""

import collections
import dataclasses
from collections.abc import MutableSequence, Sequence
from typing import ClassVar

from moe_edge.papers.coserve.schedule.coserve import InTurn
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.schedule.policy import NOTHING, Decision, Job, Lane, Scheduler

Part = tuple[int, int]  # request and expert


@dataclasses.dataclass
class Plan:
    """What a policy decided.

    Attributes:
      lanes: of each part of a request; batches: of each lane, in their order.
    """

    lanes: dict[Part, int] = dataclasses.field(default_factory=dict)
    batches: dict[int, list[list[Part]]] = dataclasses.field(default_factory=dict)


class Recording(Scheduler):
    """Another policy, whose decisions are written down in `plan`."""

    name: ClassVar[str] = "recording"
    SOURCE: ClassVar[str] = "CoServe, section 5.3: requests scheduled in advance"

    def __init__(self, policy: Scheduler):
        self.policy, self.plan = policy, Plan()
        self.max_batch = policy.max_batch
        self._experts: dict[int, int] = {}

    def queue(self, number: int) -> MutableSequence[Job]:
        return self.policy.queue(number)

    def assign(self, job: ExpertJob, lanes: Sequence[Lane], now_s: float) -> int:
        number = self.policy.assign(job, lanes, now_s)
        self._experts[job.id] = job.expert
        self.plan.lanes[job.id, job.expert] = number
        return number

    def place(self, job: Job, lane: Lane, now_s: float) -> int:
        return self.policy.place(job, lane, now_s)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        decision = self.policy.pick(lane, now_s)
        if decision.admit:
            batch = [(number, self._experts[number]) for number, _ in decision.admit]
            self.plan.batches.setdefault(lane.number, []).append(batch)
        return decision

    def done(self, job: Job, now_s: float) -> Sequence[Job]:
        return self.policy.done(job, now_s)


@dataclasses.dataclass(eq=False)
class Prescheduled(InTurn):
    """Repeats a plan: a lane waits until all of its next batch is there.

    Attributes:
      plan: of a run of the same requests on as many lanes.
    """

    name: ClassVar[str] = "prescheduled"
    SOURCE: ClassVar[str] = Recording.SOURCE
    plan: Plan = dataclasses.field(default_factory=Plan)

    def __post_init__(self):
        super().__post_init__()
        self._left = {
            number: collections.deque(map(frozenset, batches))
            for number, batches in self.plan.batches.items()
        }
        self._here: dict[int, set[Part]] = collections.defaultdict(set)

    def assign(self, job: ExpertJob, lanes: Sequence[Lane], now_s: float) -> int:
        return self.plan.lanes[job.id, job.expert]

    def place(self, job: ExpertJob, lane: Lane, now_s: float) -> int:
        self._here[lane.number].add((job.id, job.expert))
        return len(lane.waiting)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        left, here = self._left.get(lane.number), self._here[lane.number]
        if lane.running or not left or not left[0] <= here:
            return NOTHING
        batch = left.popleft()
        here -= batch
        return Decision([(number, None) for number, _ in sorted(batch)])
