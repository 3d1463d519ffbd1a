"""What no order of requests and no eviction can beat for a collaboration of experts."""

import heapq
from collections.abc import Collection, Mapping, Sequence

from moe_edge.core.checks import check_count
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.memory.evict_pool import check_uses, next_uses
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest


def uses(graph: CoeGraph, requests: Sequence[CoeRequest]) -> dict[int, int]:
    """Expert -> parts of requests that it has to judge."""
    found: dict[int, int] = {}
    for request in requests:
        expert = graph.rules.get(request.component)
        if expert is None:
            continue
        found[expert] = found.get(expert, 0) + 1
        then = None if request.is_damaged else graph.follow.get(expert)
        if then is not None:
            found[then] = found.get(then, 0) + 1
    return found


def distinct(used: Collection[int], start: Collection[int]) -> int:
    """Loads that every order needs: experts that are used and in no pool at first.

    Enough too, where requests may be put into any order.
    """
    return len(set(used) - set(start))


def belady_fcfs(
    order: Sequence[int], slots: int, start: Collection[int], num_experts: int
) -> int:
    """Loads of the best eviction, where experts are used in this order, by one pool.

    Args:
      slots: experts that it holds; exact where all are of one size, else a bound if
        it is the pool divided by the smallest.
      start: experts that it holds at first; of those above `slots` the latest go.
    """
    check_count("slots", slots)
    check_uses(order, num_experts)
    next_T, first_E = next_uses(order, num_experts)
    held = dict(sorted(((e, int(first_E[e])) for e in start), key=lambda x: x[1]))
    held = dict(list(held.items())[:slots])
    latest = [(-at, e) for e, at in held.items()]  # a heap; some entries are old
    heapq.heapify(latest)
    loads = 0
    for time, expert in enumerate(order):
        if expert not in held:
            loads += 1
            while len(held) >= slots:
                at, other = heapq.heappop(latest)
                if held.get(other) == -at:
                    del held[other]
        held[expert] = int(next_T[time])
        heapq.heappush(latest, (-held[expert], expert))
    return loads


def time_s(
    setup: Setup, used: Mapping[int, int], last_arrival_s: float, one_disk: bool
) -> float:
    """Seconds that no schedule of this machine can beat: the largest of three.

    Computing: full batches, shared perfectly between the executors. Loading: each
    expert of `distinct` that is not in the tier either once from the disk, or that many
    side by side. And the last arrival, with its own batch of one.

    Args:
      setup: of a policy at its start.
    """
    costs = setup.costs

    work_s = sum(n * costs[0].item_s(expert) for expert, n in used.items())
    # An executor does in a second at most so many seconds of the first one's work.
    speed = sum(
        max((costs[0].item_s(e) / of.item_s(e) for e in used), default=1.0)
        for of in costs
    )
    loaded = set(used) - setup.start - set(setup.tier or ())
    disk_s = sum(min(of.load_s[e] for of in costs) for e in loaded)
    if not one_disk:
        disk_s /= len(costs)
    least = (of.k_s[e] + of.b_s[e] for of in costs for e in used)
    return max(work_s / speed, disk_s, last_arrival_s + min(least, default=0.0))
