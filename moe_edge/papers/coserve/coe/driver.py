"""From a request to its verdict: what engine and simulator do alike.

A lane that rests begins its next batch in the moment in which requests come to it,
whoever brought them. So both make the same decisions in the same order, if the same
things take the same time.
"""

from collections.abc import Sequence
from typing import Any

from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.coe.serving import Batch, ExpertServing
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.papers.coserve.workload.coe_graph import OK, CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest


class ExpertDriver:
    """Serves requests once.

    Args:
      graph: of the experts; setup: of a policy, which the run uses up.

    Attributes:
      requests: in the order of their arrival; result: what came of them so far.
    """

    def __init__(self, graph: CoeGraph, setup: Setup):
        self.setup, self.serving = setup, ExpertServing(setup)
        self.requests: Sequence[CoeRequest] = ()
        self.result = CoeRun()
        self._graph = graph
        self.result.decisions_s = self.serving.decisions_s

    def _start(self, batch: Batch, now_s: float) -> None:
        """A batch has begun; `_end` or `_fail` is to follow."""
        raise NotImplementedError

    def _arrive(self, number: int, now_s: float) -> None:
        """A request is there."""
        component = self.requests[number].component
        expert = self._graph.rules.get(component)
        if expert is None:
            self.result.failed[number] = f"component {component!r} has no rule"
            return
        self.result.chains[number], self.result.scores[number] = [], []
        job = ExpertJob(number, arrival_s=now_s, expert=expert)
        lane = self.serving.come(job, now_s)
        if lane is not None:
            self._begin(lane, now_s)

    def _begin(self, lane: int, now_s: float) -> None:
        batch = self.serving.begin(lane, now_s)
        if batch is not None:
            self.result.wait_s += [now_s - job.arrival_s for job in batch.jobs]
            self._start(batch, now_s)

    def _end(
        self, batch: Batch, judged: Sequence[tuple[str, Any]], now_s: float
    ) -> None:
        """A batch is over: verdict and scores of each of its jobs."""
        result, follow = self.result, self._graph.follow.get(batch.expert)
        for job, (verdict, scores) in zip(batch.jobs, judged, strict=True):
            result.chains[job.id].append(job.expert)
            result.scores[job.id].append(scores)
            job.follow = follow if verdict == OK else None
            if job.follow is None:
                result.verdicts[job.id] = verdict
                arrival_s = self.requests[job.id].arrival_s
                result.latency_s[job.id] = now_s - arrival_s
        following = self.serving.end(batch, now_s)
        self._go_on(batch.lane, following, now_s)

    def _fail(self, batch: Batch, reason: str, now_s: float) -> None:
        """A batch's expert could not be loaded."""
        self.result.failed |= {job.id: reason for job in batch.jobs}
        self.serving.fail(batch, now_s)
        self._go_on(batch.lane, [], now_s)

    def _go_on(self, lane: int, following: Sequence[ExpertJob], now_s: float) -> None:
        self.result.time_s = now_s - self.requests[0].arrival_s
        self.result.management_s = self.serving.management_s
        # All of them come before a lane begins: they may be one batch.
        lanes = [self.serving.come(job, now_s) for job in following]
        for resting in dict.fromkeys([*lanes, lane]):
            if resting is not None:
                self._begin(resting, now_s)
