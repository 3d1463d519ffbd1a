"""MoE-Prism's scheduler: a virtual queue for every K, the best one is launched."""

import dataclasses
from typing import ClassVar

from moe_edge.core.plug_in import register
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.schedule.full_batch import FullBatch
from moe_edge.schedule.policy import NOTHING, Decision, Lane
from moe_edge.schedule.request import Request


@register
@dataclasses.dataclass(frozen=True)
class Qos(FullBatch):
    """Launches the batch with the most tokens a second (equation 3).

    A request is in the virtual queue of every K from its floor on. Only floors in use
    are compared, and of equal batches only the one at the lowest K: a higher K costs
    more. The queues are views of the one of the lane: who leaves it has left all.

    Two triggers come first. A request that has waited `max_wait_s` is in the next batch
    (the batch is then the best of those that hold it). Else, if any queue is full, the
    best full one is launched. An idle engine does not wait for a fuller batch.

    Attributes:
      costs: seconds of steps, by rows and K.
    """

    name: ClassVar[str] = "qos"
    SOURCE: ClassVar[str] = (
        "MoE-Prism, section 5.1. Differs: the cost of a batch counts its prompts and "
        "its longest answer, so that equation 3 is tokens a second at any lengths."
    )
    costs: StepCosts = dataclasses.field(kw_only=True)

    def pick(self, lane: Lane, now_s: float) -> Decision:
        if lane.running or not lane.waiting:
            return NOTHING
        queues = self.queues(lane)
        oldest = lane.waiting[0]
        if now_s >= oldest.arrival_s + self.max_wait_s:
            queues = {k: jobs for k, jobs in queues.items() if k >= oldest.floor}
        else:
            full = {k: q for k, q in queues.items() if len(q) == self.max_batch}
            queues = full or queues
        best = max(queues, key=lambda k: (self.utility(queues[k], k), -k))
        return Decision([(job.id, best) for job in queues[best]])

    def queues(self, lane: Lane) -> dict[int, list[Request]]:
        """K -> the first jobs that may run at it, as many as a batch takes."""
        most = self.max_batch
        by_floor: dict[int, list[tuple[int, Request]]] = {}
        for place, job in enumerate(lane.waiting):
            mine = by_floor.get(job.floor)
            if mine is None:
                by_floor[job.floor] = [(place, job)]
            elif len(mine) < most:
                mine.append((place, job))
        queues: dict[int, list[Request]] = {}
        first: list[tuple[int, Request]] = []
        for k in sorted(by_floor):
            before, first = first, sorted(first + by_floor[k])[:most]
            if first == before:
                continue
            batch = [job for _, job in first]
            while not lane.fits(batch):
                batch.pop()
            queues[k] = batch
        return queues

    def utility(self, jobs: list[Request], k: int) -> float:
        """Tokens a second of a batch at K, if all run as long as they may."""
        tokens = prompts = longest = 0
        for job in jobs:
            tokens += job.new_tokens
            prompts += job.prompt_tokens
            longest = max(longest, job.new_tokens)
        decode_s = longest * self.costs.decode_s(len(jobs), k)
        return tokens / (self.costs.prefill_s(prompts, k) + decode_s)
