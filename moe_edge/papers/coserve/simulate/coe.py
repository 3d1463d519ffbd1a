"""A collaboration of experts in computed time: the engine's queues, policies and pools.

An executor's step is a batch of one expert, after its load if it is not resident. An
expert comes from the host tier, where there is one that holds it, else from the disk.
One disk serves one load after another, in the order in which they begin. Deciding
takes no time here; how long it took is told beside. Verdicts are those that were drawn.
"""

from collections.abc import Sequence

from moe_edge.core.clock import EventHeap
from moe_edge.papers.coserve.coe.driver import ExpertDriver
from moe_edge.papers.coserve.coe.results import CoeRun, CoeStep
from moe_edge.papers.coserve.coe.serving import Batch
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.papers.coserve.workload.coe_graph import OK, CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import DAMAGED, CoeRequest

ARRIVE, END = range(2)


class CoeSimulator(ExpertDriver):
    """Serves requests once.

    Args:
      graph: of the experts; setup: of a policy, which the run uses up.
      one_disk: loads from it wait for each other.
    """

    def __init__(self, graph: CoeGraph, setup: Setup, one_disk: bool = True):
        super().__init__(graph, setup)
        self._one_disk = one_disk
        self._heap, self._disk_free_s = EventHeap(), 0.0
        self._batches: list[Batch | None] = [None] * len(setup.pools)

    def run(self, requests: Sequence[CoeRequest]) -> CoeRun:
        """Serves all requests, numbered by their places."""
        self.requests, heap = requests, self._heap
        for number, request in enumerate(requests):
            heap.push(request.arrival_s, ARRIVE, 0, number)
        while heap:
            now_s, kind, lane, number = heap.pop()
            if kind == ARRIVE:
                self._arrive(number, now_s)
            else:
                batch = self._batches[lane]
                self._end(batch, [*map(self._judge, batch.jobs)], now_s)
        return self.result

    def _start(self, batch: Batch, now_s: float) -> None:
        lane, expert, n = batch.lane, batch.expert, len(batch.jobs)
        ready_s = self._ready_s(batch, now_s)
        end_s = ready_s + self.setup.costs[lane].batch_s(expert, n)
        load_s, source = ready_s - now_s, (batch.tier, batch.leaving)
        step = CoeStep(now_s, end_s, load_s, lane, expert, n, *source)
        self.result.steps.append(step)
        self._batches[lane] = batch
        self._heap.push(end_s, END, lane)

    def _ready_s(self, batch: Batch, now_s: float) -> float:
        """When a batch's expert is there."""
        if batch.tier is None:
            return now_s
        if batch.tier == "host":
            return now_s + self.setup.host_load_s[batch.lane][batch.expert]
        begin_s = max(now_s, self._disk_free_s) if self._one_disk else now_s
        self._disk_free_s = begin_s + self.setup.costs[batch.lane].load_s[batch.expert]
        return self._disk_free_s

    def _judge(self, job: ExpertJob) -> tuple[str, None]:
        """A preliminary expert finds damages, the last one of a chain everything."""
        request = self.requests[job.id]
        if job.expert in self._graph.follow:
            return DAMAGED if request.is_damaged else OK, None
        return request.drawn, None
