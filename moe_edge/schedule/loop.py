"""The request loop: from arrival to the last step, as a pure state machine.

Events and the time go in, actions come out; there is no thread, clock or socket, so an
engine, a server and a simulator run the same loop. Whoever drives it calls

    arrive      a request is there: which lane it goes to
    admit       it is at its lane: whether that lane should begin a step now
    begin_step  a lane is free: the jobs of its next step
    end_step    the step is over: follow-ups; then `begin_step` again

and asks a lane again at `Lane.again_s` where the policy chose to wait. What happens in
between (which lane, where in the queue, which batch and K) is the policy's.
"""

from collections.abc import Collection, Sequence

from moe_edge.core.checks import ConfigError, RequestError, check_count
from moe_edge.schedule.policy import Job, Lane, SchedulePolicy


class RequestLoop:
    """Queues and running requests of all lanes, behind a policy.

    Attributes:
      policy: what decides.
      lanes: by number.
      open: id -> job, of all that came and are not finished.
    """

    def __init__(self, policy: SchedulePolicy, num_lanes: int = 1):
        check_count("num_lanes", num_lanes)
        self.policy = policy
        self.lanes = [Lane(number) for number in range(num_lanes)]
        self.open: dict[int, Job] = {}

    def arrive(self, job: Job, now_s: float) -> int:
        """A request comes: the lane it goes to; `admit` it once it is there.

        Raises:
          RequestError: its id is open; ConfigError: the policy named no lane.
        """
        if job.id in self.open:
            raise RequestError(f"request {job.id} is open already; ids are unique")
        number = self.policy.assign(job, self.lanes, now_s)
        if not 0 <= number < len(self.lanes):
            raise ConfigError(
                f"policy {self.policy.name} assigned request {job.id} to lane "
                f"{number}, expected 0 to {len(self.lanes) - 1}"
            )
        self.open[job.id] = job
        self.lanes[number].coming += 1
        return number

    def admit(self, job: Job, number: int, now_s: float) -> bool:
        """An arrived job enters the queue of its lane; whether that lane rests."""
        lane = self.lanes[number]
        lane.coming -= 1
        lane.waiting.insert(self.policy.place(job, lane, now_s), job)
        return not lane.stepping

    def begin_step(self, number: int, now_s: float) -> Sequence[Job]:
        """The jobs of the lane's next step; empty if it rests.

        Raises:
          ConfigError: the policy admitted a job that is not waiting there, or the last
            step has not ended.
        """
        lane = self.lanes[number]
        if lane.stepping:
            raise ConfigError(f"lane {number} has begun a step; end it first")
        admit, k, lane.again_s = self.policy.pick(lane, now_s)
        for chosen, own_k in admit:
            try:
                job = self.open[chosen]
                lane.waiting.remove(job)  # the first one, as a rule
            except (KeyError, ValueError) as error:
                raise ConfigError(
                    f"policy {self.policy.name} admitted request {chosen}, which does "
                    f"not wait in lane {number}"
                ) from error
            job.k = own_k
            lane.running.append(job)
        for chosen, own_k in k.items():
            self.open[chosen].k = own_k
        lane.stepping = bool(lane.running)
        return lane.running

    def end_step(
        self, number: int, now_s: float, finished: Collection[Job]
    ) -> list[Job]:
        """A step is over, the last one of `finished`: follow-ups, which arrive now."""
        lane = self.lanes[number]
        lane.stepping = False
        following: list[Job] = []
        if finished:
            for job in finished:
                del self.open[job.id]
                following += self.policy.done(job, now_s)
            lane.running = [job for job in lane.running if job.id in self.open]
        return following
