"""Lanes, pools and requests for the policies of a collaboration of experts."""

import collections

from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts
from moe_edge.papers.coserve.memory.evict_pool import get_pool_policy
from moe_edge.papers.coserve.memory.pool import make_pools
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.schedule.coserve import ExpertCosts
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.papers.coserve.workload.coe_tasks import board_graph
from moe_edge.schedule.loop import RequestLoop


def costs_of(num_experts, k_s=1.0, b_s=2.0, load_s=10.0, max_batch=3):
    """The same for every expert."""
    return ExpertCosts(
        *([value] * num_experts for value in (k_s, b_s, load_s, max_batch))
    )


def lanes_of(name, resident, num_experts=6, follow=None, costs=None, room=2, **options):
    """A loop with a recipe's queues; pools of `room` experts that hold `resident`."""
    follow, recipe = follow or {}, RECIPES[name]
    sizes, shares = [1] * num_experts, [1 / (n + 1) for n in range(num_experts)]
    policy = get_pool_policy(recipe.eviction)
    pools = make_pools(
        [room] * len(resident), policy, sizes, shares, list(follow.items())
    )
    for pool, experts in zip(pools, resident, strict=True):
        for expert in experts:
            pool.enter(expert)
    costs = costs or [costs_of(num_experts)] * len(pools)
    queue = recipe.queue(costs, pools, follow, **options)
    return RequestLoop(queue, len(pools)), pools


BYTES = {"resnet101": 10, "yolov5m": 5, "yolov5l": 12}


def small_machine(**changes):
    """Pools of 36, 36 and 60 bytes, and a slow kind."""

    def costs(k_s):
        load_s = {"disk": 1.0, "host": 0.3}
        return {
            n: ArchitectureCosts(k_s, 0.05, 4, 1, b, load_s) for n, b in BYTES.items()
        }

    given = {"executors": {"gpu": 2, "cpu": 1}, "memory_bytes": {"gpu": 80, "cpu": 64}}
    return Machine({"gpu": costs(0.02), "cpu": costs(0.1)}, **(given | changes))


def small_board(seed):
    """24 types and all detectors, in sizes that those pools hold a few of."""
    return board_graph(24, seed, decay=5.0, record_bytes=BYTES)


def loads_by_group(setup):
    """A count of the loads for each run of a setup's queues, which a run fills."""
    loads, choose = collections.Counter(), setup.policy.choose

    def counted(lane, now_s):
        run = choose(lane, now_s)
        loads[run] += run.expert not in setup.pools[lane.number]
        return run

    setup.policy.choose = counted
    return loads


def come(loop, number, expert, now_s=0.0):
    """A request arrives and is admitted: the lane that it went to."""
    job = ExpertJob(number, arrival_s=now_s, expert=expert)
    lane = loop.arrive(job, now_s)
    loop.admit(job, lane, now_s)
    return lane


def order(loop, lane=0):
    """Ids that wait in a lane."""
    return [job.id for job in loop.lanes[lane].waiting]


def step(loop, lane=0, now_s=0.0, follow=None):
    """Serves the lane's next batch in no time: its ids, and the follow-ups."""
    jobs = list(loop.begin_step(lane, now_s))
    for job in jobs:
        job.follow = (follow or {}).get(job.expert)
    return [job.id for job in jobs], loop.end_step(lane, now_s, jobs)
