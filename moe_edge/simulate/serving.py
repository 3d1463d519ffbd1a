"""Token serving in computed time: the server's request loop over measured costs.

A step takes what its chunks of prompts and its rows cost (`hardware.step_costs`), the
loop and all other software take no time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from moe_edge.core.clock import EventHeap
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.schedule.policy import RUNNING
from moe_edge.schedule.token_loop import Step, TokenJob, TokenLoop

ARRIVE, CANCEL, END, WAKE = range(4)


@dataclasses.dataclass(slots=True)
class Served:
    """What became of a request.

    Attributes:
      arrival_s: when it came.
      admitted_s: when its first step began; first_s, last_s: when its first and last
        token were there; None: never.
      tokens: new ones.
      k_sum: of the K of each of them; k_least: the smallest.
      outcome: how it ended.
    """

    arrival_s: float
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    k_sum: int = 0
    k_least: int | None = None
    outcome: str = ""


class ComputedServer:
    """One engine that serves requests in computed time.

    Args:
      loop: of one lane, or a recorder of it; costs: of its engine's steps.
      answers: id -> tokens after which a request's text ends; others run as long as
        they may.
      watch: is told (loop, seconds) after each decision; None: nobody.

    Attributes:
      served: id -> what became of it.
      steps: how many there were; busy_s: seconds of them.
    """

    def __init__(
        self,
        loop: TokenLoop,
        costs: StepCosts,
        answers: Mapping[int, int] | None = None,
        watch: Callable[[TokenLoop, float], None] | None = None,
    ):
        self.loop, self.costs = loop, costs
        self._answers, self._watch = answers or {}, watch
        self.served: dict[int, Served] = {}
        self.steps, self.busy_s = 0, 0.0
        self._jobs: dict[int, TokenJob] = {}

    def run(
        self, jobs: Iterable[TokenJob], cancelled: Mapping[int, float] | None = None
    ) -> dict[int, Served]:
        """Serves all requests.

        Args:
          cancelled: id -> seconds at which a request's client goes away.
        """
        heap, loop = EventHeap(), self.loop
        for job in jobs:
            self._jobs[job.id] = job
            self.served[job.id] = Served(job.arrival_s)
            heap.push(job.arrival_s, ARRIVE, 0, job.id)
        for number, time_s in (cancelled or {}).items():
            heap.push(time_s, CANCEL, 0, number)
        while heap:
            now_s, kind, _, item = heap.pop()
            self._handle(now_s, kind, item)
            if heap and heap.entries[0][0] == now_s:
                continue  # all that happens at once is seen at once
            loop.expire(now_s)
            if not loop.lanes[0].stepping and not self._begin(now_s, heap):
                wake_s = loop.wake_s(0)
                if wake_s < (heap.entries[0][0] if heap else float("inf")):
                    heap.push(wake_s, WAKE)
        for number, job in self._jobs.items():
            self.served[number].outcome = job.state
        return self.served

    def _handle(self, now_s: float, kind: int, item: int) -> None:
        if kind == ARRIVE:
            job = self._jobs[item]
            lane = self.loop.arrive(job, now_s)
            if lane is not None:
                self.loop.admit(job, lane, now_s)
        elif kind == CANCEL:
            self.loop.cancel(item)
        elif kind == END:
            self._end(now_s)

    def _begin(self, now_s: float, heap: EventHeap) -> bool:
        """A step begins, if there is anything to do."""
        running = self.loop.begin_step(0, now_s)
        if self._watch:
            self._watch(self.loop, now_s)
        if not running:
            return False
        for job in running:
            served = self.served[job.id]
            if served.admitted_s is None:
                served.admitted_s = now_s
        seconds = step_s(self.loop.steps[0], self.costs)
        self.steps, self.busy_s = self.steps + 1, self.busy_s + seconds
        heap.push(now_s + seconds, END)
        return True

    def _end(self, now_s: float) -> None:
        step = self.loop.steps[0]
        fresh = [job for job, _, stop in step.chunks if stop == job.prompt_tokens]
        stopped = []
        for job in (*fresh, *step.decode):
            if job.state != RUNNING:
                continue
            served = self.served[job.id]
            served.tokens += 1
            served.last_s = now_s
            served.first_s = now_s if served.first_s is None else served.first_s
            if job.k is not None:
                served.k_sum += job.k
                served.k_least = min(job.k, served.k_least or job.k)
            if served.tokens == self._answers.get(job.id):
                stopped.append(job)
        self.loop.end_step(0, now_s, stopped)


def step_s(step: Step, costs: StepCosts) -> float:
    """Seconds of a step: its chunks, then its rows."""
    tokens = sum(stop - start for _, start, stop in step.chunks)
    pairs = sum((stop - start) * job.k for job, start, stop in step.chunks)
    seconds = costs.prefill_s(tokens, pairs / tokens) if tokens else 0.0
    if rows := len(step.decode):
        k = sum(job.k for job in step.decode) / rows
        seconds += costs.decode_s(rows, k)
    return seconds
