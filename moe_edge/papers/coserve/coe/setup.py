"""Queues, pools and tier of one policy on one machine, as engine and simulator use
them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.memory.evict_pool import get_pool_policy
from moe_edge.papers.coserve.memory.host_tier import HostTier
from moe_edge.papers.coserve.memory.pool import Pool, fill, fill_by_work, make_pools
from moe_edge.papers.coserve.schedule.affinity import Affinity
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.schedule.coserve import ExpertCosts, InTurn
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph


@dataclasses.dataclass
class Setup:
    """What one run starts with; a run changes it.

    Attributes:
      kinds: of each executor's device.
      policy: its queues; pools: of each executor; tier: below them, or None.
      costs: of each executor; host_load_s: of loads from the tier, [executor][expert].
      start: experts that are in a pool.
    """

    kinds: Sequence[str]
    policy: InTurn
    pools: list[Pool]
    tier: HostTier | None
    costs: list[ExpertCosts]
    host_load_s: list[list[float]]

    @property
    def start(self) -> set[int]:
        return set().union(*(pool.resident for pool in self.pools))


def make_setup(
    name: str,
    graph: CoeGraph,
    machine: Machine,
    probability_E: Sequence[float],
    *,
    start_empty: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Setup:
    """Sets up one of RECIPES.

    Args:
      probability_E: uses of each expert a request.
      start_empty: nothing is resident at first.
      options: of `Affinity`; the other policies have none.
    Raises:
      CapacityError: an expert is larger than every pool, or a pool too small, though
        batches are of one image; the memory that would do is named.
    """
    recipe, sizes = RECIPES[name], graph.bytes_E.tolist()
    tier_bytes = 0
    machine = machine.fitted(graph, recipe.one_lane)
    if recipe.one_lane:
        kinds = [machine.first]
        alone, tier_bytes = machine.alone_bytes(graph)
        budgets = [alone]
    else:
        kinds = machine.kinds
        counts = machine.executors
        budgets = [machine.pool_bytes(kind, graph, counts[kind]) for kind in kinds]
    eviction, pairs = get_pool_policy(recipe.eviction), list(graph.follow.items())
    pools = make_pools(budgets, eviction, sizes, probability_E, pairs)
    tier = HostTier(tier_bytes, sizes) if recipe.tier and tier_bytes else None
    costs = [machine.costs(kind, graph) for kind in kinds]
    if not start_empty and recipe.by_work:
        experts = range(len(sizes))
        item_s = [[of.item_s(expert) for expert in experts] for of in costs]
        fill_by_work(pools, probability_E, item_s)
    elif not start_empty:
        fill(pools, probability_E)
    if not start_empty and tier is not None:
        tier.fill(probability_E, pools[0].resident)
    more = {}
    if issubclass(recipe.queue, Affinity):
        more = {"one_disk": machine.one_disk, **(options or {})}
    policy = recipe.queue(costs, pools, graph.follow, **more)
    host_load_s = [machine.host_load_s(kind, graph) for kind in kinds]
    return Setup(kinds, policy, pools, tier, costs, host_load_s)
