"""The request loop's state machine, driven by hand."""

import dataclasses

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.schedule.fifo import Fifo, FifoToIdle
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.policy import Decision, Job, SchedulePolicy


def come(loop, *jobs, now_s=0.0):
    """Arrives and admits: whether each lane may begin a step."""
    return [loop.admit(job, loop.arrive(job, now_s), now_s) for job in jobs]


def ids(jobs):
    return [job.id for job in jobs]


def test_fifo_admits_in_order_of_arrival_between_steps():
    loop = RequestLoop(Fifo(max_batch=2), 2)
    jobs = [Job(0), Job(1), Job(2), Job(3, home=1)]
    assert come(loop, jobs[0]) == [True]
    assert ids(loop.begin_step(0, 0.0)) == [0]
    assert come(loop, *jobs[1:]) == [False, False, True]  # lane 0 is in a step
    assert loop.end_step(0, 1.0, []) == []
    assert ids(loop.begin_step(0, 1.0)) == [0, 1]
    loop.end_step(0, 2.0, [jobs[0]])
    assert ids(loop.begin_step(0, 2.0)) == [1, 2]
    assert ids(loop.begin_step(1, 2.0)) == [3]
    loop.end_step(0, 3.0, jobs[1:3])
    loop.end_step(1, 3.0, jobs[3:])
    assert not loop.begin_step(0, 3.0) and not loop.open
    assert all(lane.idle for lane in loop.lanes)


def test_busy_lane_passes_on_to_the_nearest_idle_one():
    loop = RequestLoop(FifoToIdle(1, lambda n, m: abs(n - m)), 4)
    come(loop, Job(0, home=3))
    assert loop.arrive(Job(1, home=3), 0.0) == 2  # on its way: 2 is no longer idle
    assert loop.arrive(Job(2, home=3), 0.0) == 1
    assert loop.arrive(Job(3, home=0), 0.0) == 0
    assert loop.arrive(Job(4, home=1), 0.0) == 1  # nobody is idle: it stays


@dataclasses.dataclass(frozen=True)
class ByK(SchedulePolicy):
    """Waits for two, the largest id first; K changes while they run."""

    name = "by_k"
    SOURCE = "test"

    def place(self, job, lane, now_s):
        return sum(other.id > job.id for other in lane.waiting)

    def pick(self, lane, now_s):
        if lane.running:
            return Decision(k={job.id: 4 for job in lane.running})
        if len(lane.waiting) < 2:
            return Decision(again_s=now_s + 1)
        return Decision([(job.id, 8) for job in lane.waiting])

    def done(self, job, now_s):
        return [Job(job.id + 10)] if job.id < 10 else []


def test_policies_place_wait_choose_k_and_follow_up():
    loop = RequestLoop(ByK())
    jobs = [Job(0), Job(1)]
    come(loop, jobs[0])
    assert not loop.begin_step(0, 5.0) and loop.lanes[0].again_s == 6.0
    come(loop, jobs[1])
    assert [(job.id, job.k) for job in loop.begin_step(0, 5.5)] == [(1, 8), (0, 8)]
    assert loop.lanes[0].again_s is None
    loop.end_step(0, 6.0, [])
    assert [job.k for job in loop.begin_step(0, 6.0)] == [4, 4]
    (follow_up,) = loop.end_step(0, 7.0, [jobs[0]])
    assert follow_up.id == 10 and list(loop.open) == [1]


def test_what_a_policy_or_driver_must_not_do():
    loop = RequestLoop(Fifo())
    come(loop, Job(0))
    with pytest.raises(RequestError, match="request 0 is open already"):
        loop.arrive(Job(0), 0.0)
    with pytest.raises(ConfigError, match="assigned request 1 to lane 7, expected 0 "):
        loop.arrive(Job(1, home=7), 0.0)
    loop.begin_step(0, 0.0)
    with pytest.raises(ConfigError, match="lane 0 has begun a step; end it first"):
        loop.begin_step(0, 0.0)
    with pytest.raises(ConfigError, match="max_batch must be a positive whole number"):
        Fifo(0)

    class Wrong(Fifo):
        def pick(self, lane, now_s):
            return Decision([(3, None)])

    wrong = RequestLoop(Wrong())
    come(wrong, Job(0), Job(1))
    with pytest.raises(ConfigError, match="admitted request 3, which does not wait in"):
        wrong.begin_step(0, 0.0)
