"""Small cases of every scheduling policy, by hand."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.continuous_one_k import ContinuousOneK
from moe_edge.schedule.fifo import Fifo
from moe_edge.schedule.full_batch import FullBatch
from moe_edge.schedule.policy import SCHEDULERS, Job, Lane, get_scheduler
from moe_edge.schedule.request import Request
from tests.support.serving import linear_costs

COSTS = linear_costs(base_s=0.01, pair_s=0.001)


def lane_of(*floors, running=(), budget_bytes=float("inf"), new=10, **more):
    """A lane whose jobs came at 0, 1, 2, .. seconds; running ones have ids from 100."""
    lane = Lane(0, budget_bytes)
    for i, floor in enumerate(floors):
        job = Request(i, arrival_s=float(i), floor=floor, new_tokens=new, **more)
        lane.waiting.append(job)
    for i, (floor, k) in enumerate(running):
        job = Request(100 + i, floor=floor, new_tokens=new, **more)
        job.k, job.made = k, 1
        lane.running.append(job)
    return lane


def admitted(policy, lane, now_s=0.0):
    return dict(policy.pick(lane, now_s).admit)


def test_every_policy_names_itself_and_its_source():
    for name, kind in SCHEDULERS.items():
        assert kind.name == name and kind.SOURCE


def test_policies_leave_requests_where_they_came_in():
    lanes = [Lane(0), Lane(1)]
    for name in SCHEDULERS:
        policy = get_scheduler(name, own_k=8, costs=COSTS)
        assert [policy.assign(Job(0, home), lanes, 0.0) for home in (0, 1)] == [0, 1]


def test_fifo_takes_the_first_at_their_highest_floor_and_runs_them_to_the_end():
    policy = Fifo(3)
    assert admitted(policy, lane_of(8, 24, 16, 32)) == {0: 24, 1: 24, 2: 24}
    assert admitted(policy, lane_of(8, running=[(8, 8)])) == {}
    assert admitted(Fifo(1), lane_of(8, 24)) == {0: 8}  # the paper's latency policy
    lane = Lane(0)
    lane.waiting.append(Job(0))
    assert admitted(policy, lane) == {0: None}  # K may be no matter


def test_nobody_is_passed_by_a_smaller_request():
    lane = lane_of(8, 8, 8, budget_bytes=100)
    for job, size in zip(lane.waiting, (60, 50, 10), strict=True):
        job.kv_bytes = size
    assert admitted(Fifo(3), lane) == {0: 8}
    assert admitted(Continuous(3), lane) == {0: 8}


def test_full_batch_waits_until_full_flushed_or_out_of_room():
    policy = FullBatch(3, max_wait_s=5.0)
    waits = policy.pick(lane_of(8, 16), 4.9)
    assert not waits.admit and waits.again_s == 5.0
    assert admitted(policy, lane_of(8, 16), 5.0) == {0: 16, 1: 16}
    assert admitted(policy, lane_of(8, 16, 8, 32), 3.0) == {0: 16, 1: 16, 2: 16}
    room_for_one = lane_of(8, 16, budget_bytes=10, kv_bytes=6)
    assert admitted(policy, room_for_one, 1.0) == {0: 8}
    assert policy.pick(lane_of(8, running=[(8, 8)]), 9.0) == ((), {}, None)


def test_continuous_gives_every_row_its_own_floor():
    lane = lane_of(8, 24, 16, running=[(4, 4), (12, 12)])
    assert Continuous(4).pick(lane, 0.0) == ([(0, 8), (1, 24)], {}, None)
    assert admitted(Continuous(2), lane) == {}


def test_continuous_one_k_follows_the_highest_floor():
    policy = ContinuousOneK(3)
    lane = lane_of(8, 24, 32, running=[(12, 12)])
    assert policy.pick(lane, 0.0) == ([(0, 24), (1, 24)], {100: 24}, None)
    lane.running[0].made = 0  # its prompt is not through: it keeps its K
    assert policy.pick(lane, 0.0) == ([(0, 24), (1, 24)], {}, None)
    # The one that asked for 24 has gone: K falls again.
    lane = lane_of(running=[(12, 24), (8, 24)])
    assert policy.pick(lane, 0.0) == ([], {100: 12, 101: 12}, None)


def test_get_policy_gives_each_what_it_has():
    full = get_scheduler(
        "full_batch", max_batch=3, max_wait_s=2.0, own_k=8, costs=COSTS
    )
    assert full == FullBatch(3, max_wait_s=2.0)


def test_get_policy_refuses_what_it_cannot_build():
    with pytest.raises(
        ConfigError, match="scheduling policy 'vip'; known: continuous, "
    ):
        get_scheduler("vip")
    with pytest.raises(ConfigError, match="max_batch must be a positive whole .*got 0"):
        get_scheduler("fifo", max_batch=0)
    with pytest.raises(ConfigError, match="max_wait_s must be 0 or more.*got -1"):
        get_scheduler("full_batch", max_wait_s=-1)
