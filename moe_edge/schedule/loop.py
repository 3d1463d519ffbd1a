"""The request loop: from arrival to the last step, as a pure state machine.

Events and the time go in, actions come out; there is no thread, clock or socket, so an
engine, a server and a simulator run the same loop. Whoever drives it calls

    arrive      a request is there: which lane it goes to, or that it is refused
    admit       it is at its lane: whether that lane should begin a step now
    expire      some time has passed: whose deadline is over
    begin_step  a lane is free: the jobs of its next step
    end_step    the step is over: follow-ups; then `begin_step` again
    cancel      nobody waits for a request any more

and asks a lane again at `Lane.again_s` where the policy chose to wait. What happens in
between (which lane, where in the queue, which batch and K) is the policy's. The loop
holds every policy to the rules: each request ends once, no cache beyond the budget, no
K below a floor. Nothing that runs is stopped for another request.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from moe_edge.core.checks import ConfigError, RequestError, check_count, check_from_zero
from moe_edge.core.plug_in import is_ours
from moe_edge.schedule import rules
from moe_edge.schedule.policy import (
    COMING,
    OUTCOMES,
    RUNNING,
    WAITING,
    Job,
    Lane,
    Scheduler,
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a loop takes on.

    Attributes:
      max_waiting: requests in all queues beyond those that find a free place; more are
        refused. None: any number.
      kv_budget_bytes: of the caches of a lane's running requests.
      kv_together: bytes of caches from those of each: their sum, or, in a session
        whose rows have one capacity, rows times the longest.
    """

    max_waiting: int | None = None
    kv_budget_bytes: float = math.inf
    kv_together: Callable[[Iterable[int]], int] = sum

    def __post_init__(self):
        if self.max_waiting is not None:
            check_count("max_waiting", self.max_waiting)
        if self.kv_budget_bytes != math.inf:
            check_from_zero("kv_budget_bytes", self.kv_budget_bytes)


NO_LIMITS = Limits()


class RequestLoop:
    """Queues and running requests of all lanes, behind a policy.

    Attributes:
      policy: what decides.
      lanes: by number.
      open: id -> job, of all that came and have not ended.
      outcomes: how many ended in which way, of OUTCOMES; with the open ones they are
        all that arrived.
    """

    def __init__(
        self, policy: Scheduler, num_lanes: int = 1, limits: Limits = NO_LIMITS
    ):
        check_count("num_lanes", num_lanes)
        self.policy, self.limits = policy, limits
        self._is_foreign = not is_ours(policy)
        budget = limits.kv_budget_bytes, limits.kv_together
        self.lanes = [
            Lane(number, *budget, policy.queue(number)) for number in range(num_lanes)
        ]
        self.open: dict[int, Job] = {}
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self._deadlines: list[tuple[float, int]] = []  # a heap; some have ended
        self._over: list[tuple[float, int]] = []  # deadlines passed within a step

    # --- requests

    def arrive(self, job: Job, now_s: float) -> int | None:
        """A request comes: the lane it goes to; `admit` it once it is there.

        Returns:
          None if it is refused: the queue is full, or it is too large for the budget.
        Raises:
          RequestError: its id is open; ConfigError: the policy named no lane.
        """
        if job.id in self.open:
            raise RequestError(f"request {job.id} is open already; ids are unique")
        if self.full or not self.has_room(job):
            self._end(job, "refused")
            return None
        number = self.policy.assign(job, self.lanes, now_s)
        if self._is_foreign:
            rules.check_number(self.policy, number)
        if not 0 <= number < len(self.lanes):
            raise rules.no_lane(self.policy, job, number, len(self.lanes))
        self.open[job.id] = job
        job.state, job.lane = COMING, number
        self.lanes[number].coming += 1
        if job.deadline_s is not None:
            self._watch(job)
        return number

    def admit(self, job: Job, number: int, now_s: float) -> bool:
        """An arrived job enters the queue of its lane; whether that lane rests."""
        lane = self.lanes[number]
        if job.state != COMING:  # it ended on its way
            return False
        lane.coming -= 1
        place = self.policy.place(job, lane, now_s)
        if self._is_foreign:
            rules.check_place(self.policy, place, len(lane.waiting))
        lane.waiting.insert(place, job)
        job.state = WAITING
        return not lane.stepping

    def cancel(self, number: int) -> Job | None:
        """Nobody waits for request `number` any more; None if it has ended already.

        One that is in a step leaves with the end of the step.
        """
        job = self.open.get(number)
        if job is not None:
            self._leave(job, "cancelled")
        return job

    def expire(self, now_s: float) -> list[Job]:
        """The requests whose deadline is over now, and which have ended by it.

        Those that ran count as finished: what there is of an answer is the answer. One
        that is in a step still gets that step's token; it ends when this is called
        after `end_step`, and before the next `begin_step`.
        """
        ended = []
        for entry in self._over:
            heapq.heappush(self._deadlines, entry)
        self._over = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if not self._is_open(entry):
                continue
            job = self.open[entry[1]]
            if job.state == RUNNING and self.lanes[job.lane].stepping:
                self._over.append(entry)
                continue
            self._leave(job, "finished" if job.state == RUNNING else "expired")
            ended.append(job)
        return ended

    def has_room(self, job: Job) -> bool:
        """Whether a lane that runs nothing else could run a job."""
        limits = self.limits
        if limits.kv_budget_bytes == math.inf:
            return True
        return limits.kv_together([job.kv_bytes]) <= limits.kv_budget_bytes

    @property
    def full(self) -> bool:
        """Whether a request that came now would find no place in the queue."""
        most = self.limits.max_waiting
        return most is not None and self.num_waiting >= most + self._free

    @property
    def _free(self) -> int:
        """Places of lanes in which nothing runs."""
        most = self.policy.max_batch
        return sum(max(most - len(lane.running), 0) for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return sum(len(lane.waiting) + lane.coming for lane in self.lanes)

    def wake_s(self, number: int) -> float:
        """When to call `expire` and, if it rests, `begin_step` of a lane again if no
        event comes before; infinity: not at all."""
        again_s = self.lanes[number].again_s
        while self._deadlines and not self._is_open(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        first_s = self._deadlines[0][0] if self._deadlines else math.inf
        return first_s if again_s is None else min(first_s, again_s)

    # --- steps

    def begin_step(self, number: int, now_s: float) -> Sequence[Job]:
        """The jobs of the lane's next step; empty if it rests.

        Raises:
          ConfigError: the policy broke a rule, or the last step has not ended.
        """
        lane = self.lanes[number]
        if lane.stepping:
            raise ConfigError(f"lane {number} has begun a step; end it first")
        decision = self.policy.pick(lane, now_s)
        if self._is_foreign:
            rules.check_decision(self.policy, decision)
        admit, k, lane.again_s = decision
        for chosen, own_k in admit:
            try:
                job = self.open[chosen]
                lane.waiting.remove(job)  # the first one, as a rule
            except (KeyError, ValueError) as error:
                raise rules.not_waiting(self.policy, chosen, lane) from error
            self._set_k(job, own_k)
            job.state = RUNNING
            lane.running.append(job)
        if admit and not lane.fits():
            raise rules.over_budget(self.policy, lane)
        if 0 < self.policy.max_batch < len(lane.running):
            raise rules.over_batch(self.policy, lane)
        for chosen, own_k in k.items():
            found = self.open.get(chosen)
            if found is None or found.state != RUNNING or found.lane != number:
                raise rules.not_running(self.policy, chosen, lane)
            self._set_k(found, own_k)
        lane.stepping = bool(lane.running)
        return lane.running

    def end_step(
        self,
        number: int,
        now_s: float,
        finished: Collection[Job],
        failed: Collection[Job] = (),
    ) -> list[Job]:
        """A step is over, the last one of some: follow-ups, which arrive now.

        Args:
          finished: jobs that are done; failed: that ended by an error. Those that were
            cancelled meanwhile are neither.
        """
        lane = self.lanes[number]
        lane.stepping = False
        following: list[Job] = []
        for job in failed:
            if job.state == RUNNING:
                self._end(job, "failed")
        for job in finished:
            if job.state == RUNNING:
                self._end(job, "finished")
                more = self.policy.done(job, now_s)
                if more is None:  # as of a method without a return
                    expected = "a list of jobs, () for none"
                    raise rules.wrong(self.policy, "done", more, expected)
                following += more
        lane.running = [job for job in lane.running if job.state == RUNNING]
        return following

    # --- inside

    def _watch(self, job: Job) -> None:
        """Keeps its deadline; those of ended requests are at most as many as others."""
        entry: Any = job.deadline_s, job.id  # a job without one is not watched
        heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) > 2 * len(self.open):
            self._deadlines = [*filter(self._is_open, self._deadlines)]
            heapq.heapify(self._deadlines)

    def _is_open(self, entry: tuple[float, int]) -> bool:
        """Whether a deadline is one of a request that has not ended."""
        job = self.open.get(entry[1])
        return job is not None and job.deadline_s == entry[0]

    def _set_k(self, job: Job, k: int | None) -> None:
        if job.floor is not None and (k is None or k < job.floor):
            raise rules.below_floor(self.policy, job, k)
        job.k = k

    def _leave(self, job: Job, outcome: str) -> None:
        """An open request ends between two steps, or with the end of its step."""
        lane = self.lanes[job.lane]
        if job.state == COMING:
            lane.coming -= 1
        elif job.state == WAITING:
            lane.waiting.remove(job)
        elif not lane.stepping:
            lane.running.remove(job)
        self._end(job, outcome)

    def _end(self, job: Job, outcome: str) -> None:
        job.state = outcome
        self.outcomes[outcome] += 1
        self.open.pop(job.id, None)
