"""The request loop's state machine, driven by hand."""

import dataclasses
import math

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.schedule.policy import Decision, Job, Scheduler
from moe_edge.schedule.to_idle import ToIdle


def come(loop, *jobs, now_s=0.0):
    """Arrives and admits: whether each lane may begin a step."""
    return [loop.admit(job, loop.arrive(job, now_s), now_s) for job in jobs]


def ids(jobs):
    return [job.id for job in jobs]


def test_continuous_admits_in_order_of_arrival_between_steps():
    loop = RequestLoop(Continuous(max_batch=2), 2)
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
    loop = RequestLoop(ToIdle(1, lambda n, m: abs(n - m)), 4)
    come(loop, Job(0, home=3))
    assert loop.arrive(Job(1, home=3), 0.0) == 2  # on its way: 2 is no longer idle
    assert loop.arrive(Job(2, home=3), 0.0) == 1
    assert loop.arrive(Job(3, home=0), 0.0) == 0
    assert loop.arrive(Job(4, home=1), 0.0) == 1  # nobody is idle: it stays


@dataclasses.dataclass(frozen=True)
class ByK(Scheduler):
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
    loop = RequestLoop(Continuous(1))
    come(loop, Job(0))
    with pytest.raises(RequestError, match="request 0 is open already"):
        loop.arrive(Job(0), 0.0)
    with pytest.raises(ConfigError, match="assigned request 1 to lane 7, expected 0 "):
        loop.arrive(Job(1, home=7), 0.0)
    loop.begin_step(0, 0.0)
    with pytest.raises(ConfigError, match="lane 0 has begun a step; end it first"):
        loop.begin_step(0, 0.0)
    with pytest.raises(ConfigError, match="max_batch must be a positive whole number"):
        Continuous(0)

    class Wrong(Continuous):
        def pick(self, lane, now_s):
            return Decision([(3, None)])

    wrong = RequestLoop(Wrong())
    come(wrong, Job(0), Job(1))
    with pytest.raises(ConfigError, match="admitted request 3, which does not wait in"):
        wrong.begin_step(0, 0.0)


def test_requests_leave_in_every_state():
    loop = RequestLoop(Continuous(1))
    running, waiting, coming, other = (Job(i) for i in range(4))
    come(loop, running, waiting, other)
    loop.arrive(coming, 0.0)
    loop.begin_step(0, 0.0)
    assert loop.cancel(2) is coming and not loop.admit(coming, 0, 1.0)
    assert loop.cancel(1) is waiting and ids(loop.lanes[0].waiting) == [3]
    assert loop.cancel(0) is running and ids(loop.lanes[0].running) == [0]
    assert loop.cancel(0) is None and loop.cancel(77) is None
    assert loop.end_step(0, 1.0, [running]) == []  # too late: it was cancelled
    assert ids(loop.begin_step(0, 1.0)) == [3]
    loop.end_step(0, 2.0, [])
    loop.cancel(3)  # between two steps it is gone at once
    assert loop.lanes[0].idle and loop.num_waiting == 0
    assert loop.outcomes == dict.fromkeys(loop.outcomes, 0) | {"cancelled": 4}


def test_a_full_queue_and_a_request_beyond_the_budget_are_refused():
    loop = RequestLoop(Continuous(1), limits=Limits(max_waiting=1, kv_budget_bytes=10))
    large = Job(9, kv_bytes=11)
    assert loop.arrive(large, 0.0) is None and not loop.has_room(large)
    first = Job(0, kv_bytes=10)
    come(loop, first, Job(1, kv_bytes=10))
    late = Job(2)
    assert loop.full and loop.arrive(late, 0.0) is None and late.state == "refused"
    loop.begin_step(0, 0.0)
    assert loop.full  # what waited for the free place runs in it
    loop.end_step(0, 1.0, [first])
    assert not loop.full and come(loop, late) == [True]  # a refused one may come again
    assert loop.outcomes["refused"] == 2 and loop.lanes[0].kv_bytes() == 0


def test_a_queue_has_its_length_beside_free_places():
    """As many as run and wait may come to an idle lane at once."""
    loop = RequestLoop(Continuous(8), limits=Limits(max_waiting=4))
    lanes = [loop.arrive(Job(i), 0.0) for i in range(13)]
    assert lanes == [0] * 12 + [None]
    for job in [*loop.open.values()]:
        loop.admit(job, 0, 0.0)
    assert len(loop.begin_step(0, 0.0)) == 8 and loop.full
    loop.end_step(0, 1.0, [loop.open[3]])
    assert not loop.full and loop.num_waiting == 4


def test_deadlines_end_what_waits_and_cut_what_runs():
    loop = RequestLoop(Continuous(1))
    jobs = [Job(i, deadline_s=d) for i, d in enumerate((3.0, 2.0, None, 9.0))]
    come(loop, *jobs)
    assert loop.wake_s(0) == 2.0
    loop.begin_step(0, 0.0)
    assert loop.expire(1.9) == []
    assert loop.expire(3.0) == [jobs[1]]
    assert [job.state for job in jobs] == ["running", "expired", "waiting", "waiting"]
    assert loop.wake_s(0) == 9.0  # the end of a step is an event of its own
    loop.end_step(0, 3.1, [])
    assert loop.expire(3.1) == [jobs[0]] and jobs[0].state == "finished"
    assert ids(loop.begin_step(0, 3.1)) == [2]
    loop.end_step(0, 4.0, [jobs[2]])
    come(loop, Job(10, deadline_s=8.0))
    loop.cancel(10)
    assert loop.wake_s(0) == 9.0 and loop.expire(8.5) == []  # it had ended
    assert loop.wake_s(0) == 9.0


def test_deadlines_of_ended_requests_are_forgotten():
    """A server runs for months: what ended leaves nothing that stays a day."""
    loop = RequestLoop(Continuous(4))
    come(loop, Job(0, deadline_s=50.0))
    for i in range(1, 1000):
        come(loop, Job(i, deadline_s=100.0 + i % 7))
        loop.cancel(i)
        assert len(loop._deadlines) <= 2 * (len(loop.open) + 1)
    assert loop.wake_s(0) == 50.0
    assert loop.expire(60.0) and loop.wake_s(0) == math.inf


def test_who_finishes_in_the_step_of_its_deadline_ends_once():
    loop = RequestLoop(Continuous(1))
    job = Job(0, deadline_s=1.0)
    come(loop, job)
    loop.begin_step(0, 0.0)
    assert loop.expire(1.0) == loop.expire(1.5) == []
    loop.end_step(0, 2.0, [job])
    assert loop.expire(2.0) == [] and loop.outcomes["finished"] == 1


def test_an_id_may_come_again_with_another_deadline():
    loop = RequestLoop(Continuous(1))
    come(loop, Job(0, deadline_s=1.0))
    loop.cancel(0)
    come(loop, Job(0, deadline_s=5.0))
    assert loop.expire(1.0) == [] and loop.num_waiting == 1


def test_one_request_fails_and_the_others_go_on():
    loop = RequestLoop(ByK())
    jobs = [Job(0), Job(1)]
    come(loop, *jobs)
    loop.begin_step(0, 0.0)
    assert loop.end_step(0, 1.0, [jobs[0]], failed=[jobs[0]]) == []  # no follow-up
    assert ids(loop.begin_step(0, 1.0)) == [1]
    assert loop.outcomes["failed"] == 1 and jobs[0].state == "failed"


@pytest.mark.parametrize(
    "decision, message",
    [
        (Decision([(0, 7)]), "policy own gave request 0 K 7, its floor is 8"),
        (Decision([(0, None)]), "policy own gave request 0 K None, its floor is 8"),
        (Decision([(0, 8)], {1: 8}), "gave a K to request 1, which does not run in la"),
        (Decision([(0, 8)], {0: 4}), "gave request 0 K 4, its floor is 8"),
        (
            Decision([(0, 8), (1, 8)]),
            "lane 0 with caches of 12 bytes, the budget is 10",
        ),
    ],
)
def test_rules_that_no_policy_breaks(decision, message):
    class Own(Continuous):
        name = "own"

        def pick(self, lane, now_s):
            return decision

    loop = RequestLoop(Own(), limits=Limits(kv_budget_bytes=10))
    come(loop, Job(0, floor=8, kv_bytes=6), Job(1, floor=8, kv_bytes=6))
    with pytest.raises(ConfigError, match=message):
        loop.begin_step(0, 0.0)


def test_policy_that_runs_more_than_it_says_is_refused():
    class Greedy(Continuous):
        def pick(self, lane, now_s):
            return Decision([(job.id, None) for job in lane.waiting])

    loop = RequestLoop(Greedy(max_batch=2))
    come(loop, Job(0), Job(1), Job(2))
    with pytest.raises(
        ConfigError, match="Greedy runs 3 requests in lane 0, its max_b"
    ):
        loop.begin_step(0, 0.0)


def test_limits_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="max_waiting must be a positive .*got 0"):
        Limits(max_waiting=0)
    with pytest.raises(ConfigError, match="kv_budget_bytes must be 0 or more.*got -1"):
        Limits(kv_budget_bytes=-1)
