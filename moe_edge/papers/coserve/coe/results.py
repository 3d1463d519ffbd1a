"""What came of requests for experts, and how it is told: rows, lines and events."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.events import Event
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest


class CoeStep(NamedTuple):
    """A batch.

    Attributes:
      begin_s, end_s: with its load; load_s: of that, the wait for the disk included.
      lane, expert, requests: whose, and how many.
      tier: where the expert was loaded from; None: it was resident.
      leaving: experts that left the pool for it.
      failed: its expert could not be loaded.
    """

    begin_s: float
    end_s: float
    load_s: float
    lane: int
    expert: int
    requests: int
    tier: str | None
    leaving: Sequence[int]
    failed: bool = False


@dataclasses.dataclass
class CoeRun:
    """What came of the requests, numbered by their places.

    Attributes:
      time_s: from the first arrival to the last end.
      chains: request -> experts that judged it, in their order; scores: -> of each.
      verdicts: request -> of the last expert; latency_s: -> seconds.
      failed: request -> reason.
      wait_s: in a queue, of every part of every request.
      steps: as they began.
      decisions_s: measured seconds of each assignment and each pick.
      management_s: measured seconds of the pools.
      late_s: by which requests came later than they should; of an engine only.
    """

    time_s: float = 0.0
    chains: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    scores: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    verdicts: dict[int, str] = dataclasses.field(default_factory=dict)
    latency_s: dict[int, float] = dataclasses.field(default_factory=dict)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    wait_s: list[float] = dataclasses.field(default_factory=list)
    steps: list[CoeStep] = dataclasses.field(default_factory=list)
    decisions_s: list[float] = dataclasses.field(default_factory=list)
    management_s: float = 0.0
    late_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def switches_by_tier(self) -> dict[str, int]:
        """Loads into a pool, by where from."""
        tiers = [step.tier for step in self.steps if not step.failed]
        return {tier: tiers.count(tier) for tier in ("disk", "host")}

    @property
    def switches(self) -> int:
        return sum(self.switches_by_tier.values())

    @property
    def throughput_per_s(self) -> float:
        """Requests that were judged a second."""
        return len(self.latency_s) / self.time_s if self.time_s else 0.0

    @property
    def longest_wait_s(self) -> float:
        """Of a request, or of its next part, in a queue."""
        return max(self.wait_s, default=0.0)

    @property
    def answers(self) -> tuple[Mapping, Mapping, Mapping]:
        """What must not depend on a policy."""
        return self.verdicts, self.chains, self.failed


def row(run: CoeRun) -> dict[str, Any]:
    """The figures of a policy. Times of deciding are always measured."""
    decisions_s, latency_s = run.decisions_s, list(run.latency_s.values())
    time_s = run.time_s or np.inf
    found = {
        "throughput_per_s": run.throughput_per_s,
        "time_s": run.time_s,
        "switches": run.switches,
        "switches_by_tier": run.switches_by_tier,
        "latency_s": _spread(latency_s),
        "scheduling_ratio": sum(decisions_s) / time_s,
        "management_ratio": run.management_s / time_s,
        "decision_s": float(np.mean(decisions_s)) if decisions_s else None,
        "decision_spread_s": _spread(decisions_s),
        "failed": len(run.failed),
        "longest_wait_s": run.longest_wait_s,
    }
    return found | ({"late_s": _spread(run.late_s)} if run.late_s else {})


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p99"))
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}


def outputs(
    graph: CoeGraph, requests: Sequence[CoeRequest], run: CoeRun
) -> list[Mapping[str, Any]]:
    """A line of `outputs.jsonl` a request; scores are those of each expert."""
    found = []
    for number, request in enumerate(requests):
        failed = run.failed.get(number)
        found.append(
            {
                "id": request.id,
                "verdict": None if failed else run.verdicts[number],
                "chain": [graph.experts[e].id for e in run.chains.get(number, [])],
                "scores": run.scores.get(number),
                "latency_s": run.latency_s.get(number),
                "failed": failed,
            }
        )
    return found


def progress(name: str, run: CoeRun) -> str:
    """A line while it runs."""
    tiers = ", ".join(f"{n} from {tier}" for tier, n in run.switches_by_tier.items())
    return (
        f"{name}: {run.throughput_per_s:.3g} requests/s, all in {run.time_s:.4g} s, "
        f"{run.switches} switches of experts (loads: {tiers}), longest wait "
        f"{run.longest_wait_s:.4g} s"
    )


def run_events(run: CoeRun, sizes: Sequence[int]) -> list[Event]:
    """A run as records: what left, was loaded and computed, by executor (`server`)."""
    found = []
    for number, step in enumerate(run.steps):
        where = {"step": number, "server": step.lane}
        for expert in step.leaving:
            found.append(Event(step.begin_s, 0.0, "evict", expert=expert, **where))
        where["expert"] = step.expert
        if step.failed:
            found.append(Event(step.begin_s, 0.0, "fail", **where))
            continue
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
