"""A collaboration of experts in computed time: the engine's queues, policies and pools.

An executor's step is a batch of one expert, after its load if it is not resident. An
expert comes from the host tier, where there is one that holds it, else from the disk.
One disk serves one load after another, in the order in which they begin. Deciding
takes no time here; how long it took is told beside.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

from moe_edge.coe.setup import Setup
from moe_edge.core.clock import EventHeap
from moe_edge.core.events import Event
from moe_edge.schedule.loop import RequestLoop
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
        self.setup, self.loop = setup, RequestLoop(setup.policy, len(setup.pools))
        self._graph, self._one_disk = graph, one_disk
        self._heap, self._disk_free_s = EventHeap(), 0.0
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
        started = time.perf_counter()
        lane = self.loop.arrive(job, now_s)
        rests = self.loop.admit(job, lane, now_s)
        self.result.decisions_s.append(time.perf_counter() - started)
        if rests:
            self._begin(lane, now_s)

    def _begin(self, lane: int, now_s: float) -> None:
        started = time.perf_counter()
        jobs = self.loop.begin_step(lane, now_s)
        decided = time.perf_counter()
        if not jobs:
            return
        expert, setup, result = jobs[0].expert, self.setup, self.result
        pool, ready_s, tier = setup.pools[lane], now_s, None
        leaving: Sequence[int] = ()
        if expert not in pool:
            leaving = pool.enter(expert)
            tier, ready_s = self._load(lane, expert, leaving, now_s)
        pool.touch(expert, now_s)
        end_s = ready_s + setup.costs[lane].batch_s(expert, len(jobs))
        result.decisions_s.append(decided - started)
        result.management_s += time.perf_counter() - decided
        result.wait_s += [now_s - job.arrival_s for job in jobs]
        load_s, n = ready_s - now_s, len(jobs)
        step = CoeStep(now_s, end_s, load_s, lane, expert, n, tier, leaving)
        result.steps.append(step)
        self._heap.push(end_s, END, lane)

    def _load(
        self, lane: int, expert: int, leaving: Sequence[int], now_s: float
    ) -> tuple[str, float]:
        """Where an expert comes from, and when it is there."""
        tier = self.setup.tier
        found = tier is not None and tier.take(expert)
        if tier is not None:
            tier.keep(leaving)
        if found:
            return "host", now_s + self.setup.host_load_s[lane][expert]
        begin_s = max(now_s, self._disk_free_s) if self._one_disk else now_s
        self._disk_free_s = begin_s + self.setup.costs[lane].load_s[expert]
        return "disk", self._disk_free_s

    def _end(self, lane: int, now_s: float) -> None:
        result, jobs = self.result, list(self.loop.lanes[lane].running)
        for job in jobs:
            result.chains[job.id].append(job.expert)
            request = self._requests[job.id]
            goes_on = len(result.chains[job.id]) == 1 and not request.is_damaged
            job.follow = self._graph.follow.get(job.expert) if goes_on else None
            if job.follow is None:
                result.latency_s[job.id] = now_s - request.arrival_s
        for job in self.loop.end_step(lane, now_s, jobs):
            self._come(job, now_s)
        if not self.loop.lanes[lane].stepping:
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
