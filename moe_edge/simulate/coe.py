"""A collaboration of experts in computed time: the engine's queues, policies and pools.

An executor's step is a batch of one expert, after its load if it is not resident. An
expert comes from the host tier, where there is one that holds it, else from the disk.
One disk serves one load after another, in the order in which they begin. Deciding
takes no time here; how long it took is told beside.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from moe_edge.coe.serving import Batch, ExpertServing
from moe_edge.coe.setup import Setup
from moe_edge.core.clock import EventHeap
from moe_edge.core.events import Event
from moe_edge.schedule.run_queue import ExpertJob
from moe_edge.workload.coe_graph import CoeGraph
from moe_edge.workload.coe_tasks import CoeRequest

ARRIVE, END = range(2)


class CoeStep(NamedTuple):
    """A batch.

    Attributes:
      begin_s, end_s: with its load; load_s: of that, the wait for the disk included.
      lane, expert, requests: whose, and how many.
      tier: where the expert was loaded from; None: it was resident.
      leaving: experts that left the pool for it.
    """

    begin_s: float
    end_s: float
    load_s: float
    lane: int
    expert: int
    requests: int
    tier: str | None
    leaving: Sequence[int]


@dataclasses.dataclass
class CoeRun:
    """What came of the requests.

    Attributes:
      time_s: from the first arrival to the last end.
      chains: request -> experts that judged it, in their order; latency_s: -> seconds.
      failed: request -> reason.
      wait_s: in a queue, of every part of every request.
      steps: as they began.
      decisions_s: measured seconds of each assignment and each pick.
      management_s: measured seconds of the pools.
    """

    time_s: float = 0.0
    chains: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    latency_s: dict[int, float] = dataclasses.field(default_factory=dict)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    wait_s: list[float] = dataclasses.field(default_factory=list)
    steps: list[CoeStep] = dataclasses.field(default_factory=list)
    decisions_s: list[float] = dataclasses.field(default_factory=list)
    management_s: float = 0.0

    @property
    def switches_by_tier(self) -> dict[str, int]:
        """Loads into a pool, by where from."""
        tiers = [step.tier for step in self.steps]
        return {tier: tiers.count(tier) for tier in ("disk", "host")}

    @property
    def switches(self) -> int:
        return sum(self.switches_by_tier.values())

    @property
    def throughput_per_s(self) -> float:
        """Requests that were judged a second."""
        return len(self.latency_s) / self.time_s if self.time_s else 0.0


class CoeSimulator:
    """Serves requests once.

    Args:
      graph: of the experts; setup: of a policy, which the run uses up.
      one_disk: loads from it wait for each other.
    """

    def __init__(self, graph: CoeGraph, setup: Setup, one_disk: bool = True):
        self.setup, self.serving = setup, ExpertServing(setup)
        self._graph, self._one_disk = graph, one_disk
        self._heap, self._disk_free_s = EventHeap(), 0.0
        self._batches: list[Batch | None] = [None] * len(setup.pools)
        self._requests: Sequence[CoeRequest] = ()
        self.result = CoeRun()

    def run(self, requests: Sequence[CoeRequest]) -> CoeRun:
        """Serves all requests, numbered by their places."""
        self._requests, heap, result = requests, self._heap, self.result
        for number, request in enumerate(requests):
            heap.push(request.arrival_s, ARRIVE, 0, number)
        while heap:
            now_s, kind, lane, number = heap.pop()
            if kind == ARRIVE:
                self._arrive(number, now_s)
            else:
                self._end(lane, now_s)
        result.time_s = heap.now_s - requests[0].arrival_s
        result.decisions_s = self.serving.decisions_s
        result.management_s = self.serving.management_s
        return result

    def _arrive(self, number: int, now_s: float) -> None:
        component = self._requests[number].component
        expert = self._graph.rules.get(component)
        if expert is None:
            self.result.failed[number] = f"component {component!r} has no rule"
            return
        self.result.chains[number] = []
        self._come(ExpertJob(number, arrival_s=now_s, expert=expert), now_s)

    def _come(self, job: ExpertJob, now_s: float) -> None:
        lane = self.serving.come(job, now_s)
        if lane is not None:
            self._begin(lane, now_s)

    def _begin(self, lane: int, now_s: float) -> None:
        batch = self._batches[lane] = self.serving.begin(lane, now_s)
        if batch is None:
            return
        expert, n, result = batch.expert, len(batch.jobs), self.result
        ready_s = self._ready_s(batch, now_s)
        end_s = ready_s + self.setup.costs[lane].batch_s(expert, n)
        result.wait_s += [now_s - job.arrival_s for job in batch.jobs]
        load_s, source = ready_s - now_s, (batch.tier, batch.leaving)
        step = CoeStep(now_s, end_s, load_s, lane, expert, n, *source)
        result.steps.append(step)
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

    def _end(self, lane: int, now_s: float) -> None:
        result, batch = self.result, self._batches[lane]
        for job in batch.jobs:
            result.chains[job.id].append(job.expert)
            request = self._requests[job.id]
            goes_on = len(result.chains[job.id]) == 1 and not request.is_damaged
            job.follow = self._graph.follow.get(job.expert) if goes_on else None
            if job.follow is None:
                result.latency_s[job.id] = now_s - request.arrival_s
        for job in self.serving.end(batch, now_s):
            self._come(job, now_s)
        if not self.serving.loop.lanes[lane].stepping:
            self._begin(lane, now_s)


def run_events(run: CoeRun, sizes: Sequence[int]) -> list[Event]:
    """A run as records: what left, was loaded and computed, by executor (`server`)."""
    found = []
    for number, step in enumerate(run.steps):
        where = {"step": number, "server": step.lane}
        for expert in step.leaving:
            found.append(Event(step.begin_s, 0.0, "evict", expert=expert, **where))
        where["expert"] = step.expert
        if step.tier is None:
            found.append(Event(step.begin_s, 0.0, "hit", **where))
        else:
            size = sizes[step.expert]
            found.append(
                Event(
                    *(step.begin_s, step.load_s, "transfer", "demand"),
                    **where,
                    bytes=size,
                )
            )
        ready_s = step.begin_s + step.load_s
        found.append(Event(ready_s, step.end_s - ready_s, "compute", **where))
    return found
