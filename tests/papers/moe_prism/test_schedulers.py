"""Small cases of MoE-Prism's scheduler and of ours, by hand."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.moe_prism.elastic import Elastic
from moe_edge.papers.moe_prism.qos import Qos
from moe_edge.schedule.policy import Lane, get_scheduler
from tests.schedule.test_policies import COSTS, admitted, lane_of
from tests.support.serving import waiting_line


def test_qos_launches_the_most_tokens_a_second():
    policy = Qos(5, max_wait_s=100.0, costs=COSTS)
    # A step takes 10 ms and 1 ms a pair. Prompts of one token count as 16: alone at 4
    # 10 * (10 + 4) + 10 + 64 = 214 ms for 10 tokens; all three at 8
    # 10 * (10 + 24) + 10 + 128 = 478 ms for 30: 62.8 tokens a second beside 46.7.
    lane = lane_of(4, 8, 8)
    assert policy.utility(list(lane.waiting)[:1], 4) == pytest.approx(10 / 0.214)
    assert policy.utility(list(lane.waiting), 8) == pytest.approx(30 / 0.478)
    assert admitted(policy, lane) == {0: 8, 1: 8, 2: 8}
    # Raising three from 4 to 32 for a fourth: 30 / .294 beside 40 / 1.902.
    assert admitted(policy, lane_of(4, 4, 32, 4)) == {0: 4, 1: 4, 3: 4}


def test_qos_compares_floors_in_use_only():
    calls = []

    class Counted(Qos):
        def utility(self, jobs, k):
            calls.append(k)
            return super().utility(jobs, k)

    Counted(4, costs=COSTS).pick(lane_of(4, 30, 4), 0.0)
    assert calls == [4, 30]


def test_qos_triggers_timeout_before_full_before_best():
    policy = Qos(2, max_wait_s=3.0, costs=COSTS)
    # Nobody waited enough: queue 4 is not full, queue 32 is.
    assert admitted(policy, lane_of(32, 4), 2.9) == {0: 32, 1: 32}
    # Two full queues: the better one.
    assert admitted(policy, lane_of(32, 4, 4), 2.9) == {1: 4, 2: 4}
    # Request 0 came at 0: it has waited 3 s, and is in the next batch whatever that is.
    assert admitted(policy, lane_of(32, 4, 4), 3.0) == {0: 32, 1: 32}
    # Of the batches that hold the oldest one the best.
    assert admitted(policy, lane_of(4, 32, 4), 9.0) == {0: 4, 2: 4}


@pytest.mark.parametrize("now_s", [0.0, 1e6])
@pytest.mark.parametrize("waiting", [5, 40, 1000])
def test_qos_matches_virtual_queues_of_all_levels(waiting, now_s):
    policy = Qos(8, max_wait_s=1.0, costs=COSTS)
    for seed in range(5):
        lane = Lane(0)
        lane.waiting.extend(waiting_line(waiting, 32, seed))
        queues = {
            k: [job for job in lane.waiting if job.floor <= k][:8] for k in range(1, 33)
        }
        queues = {k: jobs for k, jobs in queues.items() if jobs}
        if now_s:  # all have waited too long
            queues = {k: q for k, q in queues.items() if lane.waiting[0] in q}
        elif waiting > 8:
            queues = {k: jobs for k, jobs in queues.items() if len(jobs) == 8}
        best = max(queues, key=lambda k: policy.utility(queues[k], k))
        expected = {job.id: best for job in queues[best]}
        assert admitted(policy, lane, now_s) == expected


def test_qos_fills_a_batch_as_far_as_there_is_room():
    policy = Qos(4, max_wait_s=0.0, costs=COSTS)
    lane = lane_of(8, 8, 8, budget_bytes=100, kv_bytes=40)
    assert admitted(policy, lane, 9.0) == {0: 8, 1: 8}


def test_elastic_goes_as_far_as_slots_are_free():
    policy = Elastic(5, own_k=32, costs=COSTS)
    assert admitted(policy, lane_of(8)) == {0: 32}
    assert admitted(policy, lane_of(8, 16)) == {0: 26, 1: 28}  # three quarters
    assert admitted(policy, lane_of(*5 * [8])) == dict.fromkeys(range(5), 8)
    # Somebody waits: floors, for those that run too.
    lane = lane_of(8, 8, running=4 * [(16, 20)])
    decision = policy.pick(lane, 0.0)
    assert decision == ([(0, 8)], dict.fromkeys(range(100, 104), 16), None)
    lane.running[0].made = 0  # its prompt is not through: it keeps its K
    assert 100 not in policy.pick(lane, 0.0).k
    assert admitted(Elastic(1, own_k=32, costs=COSTS), lane_of(8)) == {0: 32}


def test_elastic_takes_back_what_a_deadline_needs():
    policy = Elastic(5, own_k=32, costs=COSTS)
    # Ten tokens at K 32 take 10 * 42 ms, at 26 10 * 36, at 20 300, at 14 240 ms.
    for deadline_s, k in ((0.43, 32), (0.37, 26), (0.31, 20), (0.25, 14), (0.1, 8)):
        assert admitted(policy, lane_of(8, deadline_s=deadline_s)) == {0: k}


def test_elastic_is_made_of_own_k_and_costs():
    made = get_scheduler("elastic", own_k=8, costs=COSTS)
    assert made == Elastic(8, own_k=8, costs=COSTS)
    with pytest.raises(ConfigError, match="elastic got no own_k, costs; costs a"):
        get_scheduler("elastic")
    with pytest.raises(ConfigError, match="own_k must be a positive whole .*got -3"):
        get_scheduler("elastic", own_k=-3, costs=COSTS)
