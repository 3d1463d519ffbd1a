"""How many executors, and how many experts in fast memory: by trial on a sample.

Whoever can serve the sample on a machine can be asked: the engine in real time, or the
simulator. Numbers that the user gives need no trial.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_edge.core.checks import CapacityError, ConfigError, check_count, check_known
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.memory.coserve_memory import (
    Window,
    check_window,
    decaying_window,
)
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest

SOURCE = "CoServe (ASPLOS 2025), sections 4.4, 4.5 and 5.3"
SAMPLE_SHARE = 0.5  # of the requests; fewer mislead, see docs/measurements.md
MOST_FIRST, MOST_OTHER = 4, 2  # executors that are tried, of the fast kind and others


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """How numbers are tried.

    Attributes:
      trial_share: of the requests that a trial serves, the first ones; fewer mislead.
      window_start: experts of the first window of resident experts; its later ones
        are 1 - window_start / 100 times as wide each.
      window_margin: part of the predicted throughput by which it may be missed.
    """

    trial_share: float = SAMPLE_SHARE
    window_start: int = 15
    window_margin: float = 0.05

    def __post_init__(self):
        if not 0 < self.trial_share <= 1:
            raise ConfigError(
                f"trial_share is {self.trial_share}, expected a share above 0, up to 1"
            )
        check_window(self.window_start, self.window_margin, "window_")


USUAL = TrialOptions()
Throughput = Callable[[Machine], float]  # requests a second on a machine


class Trial(NamedTuple):
    """What was tried, and what is best.

    Attributes:
      executors: of each kind, those with 0 left out.
      tried: (executors, throughput) in the order of the runs; None: they do not fit.
    """

    executors: Mapping[str, int]
    tried: Sequence[tuple[Mapping[str, int], float | None]]


def sample_of(
    requests: Sequence[CoeRequest], share: float = SAMPLE_SHARE
) -> Sequence[CoeRequest]:
    """The first requests, at their times."""
    return requests[: max(round(share * len(requests)), 1)]


def try_executors(
    most: Mapping[str, int], throughput: Callable[[Mapping[str, int]], float]
) -> Trial:
    """Finds a good number of executors of each kind, one kind after the other.

    Of the first kind 1 to `most` are tried without others; then of the next one, beside
    the best number of the first, as the paper does it. Of equal ones fewer are taken.

    Args:
      most: kind -> largest number; the first kind is the fast one.
      throughput: of a sample; CapacityError: so many do not fit, nor do more.
    Raises:
      CapacityError: not even one executor of the first kind fits.
    """
    first = next(iter(most))
    best, best_value = {}, 0.0
    tried: list[tuple[Mapping[str, int], float | None]] = []
    for kind, count in most.items():
        check_count(f"most executors of {kind}", count)
        kept = dict(best)
        for number in range(1, count + 1):
            executors = kept | {kind: number}
            try:
                value = throughput(executors)
            except CapacityError:
                if kind == first and number == 1:
                    raise
                tried.append((executors, None))
                break
            tried.append((executors, value))
            if not best or value > best_value:
                best, best_value = executors, value
    return Trial(best, tried)


def with_executors(machine: Machine, executors: Mapping[str, int]) -> Machine:
    """The machine with other executors.

    One memory of all kinds is shared evenly; of several, that of a kind without
    executors stays unused.

    Raises:
      ConfigError: a kind that the machine lacks.
    """
    for kind in executors:
        check_known("kind of executor", kind, machine.memory_bytes)
    memory = {kind: machine.memory_bytes[kind] for kind in executors}
    if machine.unified:
        each = sum(machine.memory_bytes.values()) // sum(executors.values())
        memory = {kind: each * count for kind, count in executors.items()}
    return dataclasses.replace(machine, executors=executors, memory_bytes=memory)


def with_experts(machine: Machine, graph: CoeGraph, experts: int) -> Machine | None:
    """The machine with so many experts in the pools of its first kind together.

    They count as large as the mean one; what is left is for batches, which end where it
    does. None: not even batches of one image fit.
    """
    kind = machine.first
    executors = machine.executors[kind]
    pool = int(experts * graph.bytes_E.mean()) // executors
    left = machine.memory_bytes[kind] // executors - pool
    changed = machine.with_batches(kind, graph, left)
    if changed is None or pool < graph.bytes_E.min():
        return None
    memory = executors * (pool + changed.batch_bytes(kind, graph))
    memory_bytes = {**machine.memory_bytes, kind: memory}
    return dataclasses.replace(changed, memory_bytes=memory_bytes)


def slide_window(
    machine: Machine,
    graph: CoeGraph,
    throughput: Throughput,
    trying: TrialOptions = USUAL,
) -> Window | None:
    """Where the throughput falls behind as pools of the first kind hold more experts.

    Args:
      throughput: is asked once for each number in the window's `tried`, in their order.
      trying: how the window slides.
    Returns:
      The window; None: not even one expert fits beside a batch of one image.
    """
    numbers = range(1, len(graph.experts) + 1)
    fitting = [n for n in numbers if with_experts(machine, graph, n) is not None]
    if not fitting:
        return None
    return decaying_window(
        lambda n: throughput(with_experts(machine, graph, max(n, fitting[0]))),
        *(fitting[-1], trying.window_start, trying.window_margin),
    )


def chosen_machine(
    machine: Machine,
    graph: CoeGraph,
    throughput: Throughput,
    most: Mapping[str, int] | None = None,
    trying: TrialOptions = USUAL,
) -> tuple[Machine, dict[str, Any]]:
    """The machine on which a sample was served fastest, and what was tried, for JSON.

    Numbers of executors first, then of experts in fast memory. The paper takes any
    number within the window that it ends with; this takes what was fastest of all.

    Args:
      most: executors of each kind that are tried; None: 4 of the first, 2 of others.
      trying: how the window slides.
    Raises:
      CapacityError: the machine has no room for one executor.
    """
    if most is None:
        most = dict.fromkeys(machine.executors, MOST_OTHER)
        most[machine.first] = MOST_FIRST
    measured: list[tuple[float, Machine]] = []

    def measure(tried: Machine) -> float:
        value = throughput(tried)
        measured.append((value, tried))
        return value

    trial = try_executors(most, lambda e: measure(with_executors(machine, e)))
    chosen = with_executors(machine, trial.executors)
    window = slide_window(chosen, graph, measure, trying)
    _, best = max(measured, key=lambda one: one[0])
    return best, _told(best, trial, window)


def _told(best: Machine, trial: Trial, window: Window | None) -> dict[str, Any]:
    found = {
        "executors": dict(best.executors),
        "memory_bytes": dict(best.memory_bytes),
        "executors_tried": [[dict(e), value] for e, value in trial.tried],
    }
    if window is not None:
        ends = {"low": window.low, "high": window.high, "chosen": window.chosen}
        found["window"] = ends | {"tried": [list(one) for one in window.tried]}
    return found
