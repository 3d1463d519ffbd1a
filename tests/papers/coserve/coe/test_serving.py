"""Queues, pools and tier as engine and simulator drive them, by hand."""

from moe_edge.papers.coserve.coe.serving import ExpertServing
from moe_edge.papers.coserve.coe.setup import Setup
from moe_edge.papers.coserve.memory.host_tier import HostTier
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from tests.papers.coserve.support.experts import costs_of, lanes_of


def serving_of(name, resident, tier=None, follow=None):
    """Pools of two experts that hold `resident`, six experts in all."""
    loop, pools = lanes_of(name, resident, follow=follow)
    costs = [costs_of(6)] * len(pools)
    setup = Setup(["gpu"] * len(pools), loop.policy, pools, tier, costs, [[1.0] * 6])
    return ExpertServing(setup)


def test_batch_says_where_its_expert_comes_from_and_who_leaves():
    tier = HostTier(1, [1] * 6)
    serving = serving_of("samba", [[0, 1]], tier)
    jobs = [ExpertJob(n, expert=e) for n, e in enumerate((0, 2, 1, 1))]
    assert [serving.come(job, 0.0) for job in jobs] == [0, 0, 0, 0]  # it rests
    first = serving.begin(0, 0.0)
    assert (first.expert, first.jobs, first.tier) == (0, jobs[:1], None)
    assert not first.leaving and not first.dropped
    assert serving.come(ExpertJob(4, expert=0), 0.5) is None  # it does not any more
    assert serving.end(first, 1.0) == []
    second = serving.begin(0, 1.0)
    assert (second.expert, second.tier, list(second.leaving)) == (2, "disk", [1])
    assert 1 in tier and not second.dropped
    serving.end(second, 2.0)
    third = serving.begin(0, 2.0)  # 1 is in the tier; 0 goes there
    assert (third.expert, third.tier, list(third.leaving)) == (1, "host", [0])
    assert 0 in tier and 1 not in tier and third.jobs == jobs[2:]
    serving.end(third, 3.0)
    fourth = serving.begin(0, 3.0)
    assert fourth.tier == "host" and not fourth.dropped
    assert len(serving.decisions_s) == 5 + 4 and serving.management_s > 0


def test_follow_up_comes_back():
    serving = serving_of("coserve", [[0, 1]], follow={0: 1})
    jobs = [ExpertJob(n, expert=0) for n in range(2)]
    for job in jobs:
        serving.come(job, 0.0)
    batch = serving.begin(0, 0.0)
    jobs[0].follow = 1
    (following,) = serving.end(batch, 5.0)
    assert (following.id, following.expert, following.arrival_s) == (0, 1, 5.0)
    assert serving.loop.outcomes["finished"] == 2
    assert serving.come(following, 5.0) == 0
    assert serving.begin(0, 5.0).expert == 1
    assert not serving.loop.lanes[0].waiting


def test_expert_that_cannot_be_loaded_is_in_no_pool_and_its_requests_end():
    serving = serving_of("coserve", [[0, 1]])
    for number in range(2):
        serving.come(ExpertJob(number, expert=4), 0.0)
    batch = serving.begin(0, 0.0)
    assert (batch.tier, list(batch.leaving)) == ("disk", batch.dropped)
    serving.fail(batch, 1.0)
    assert serving.setup.pools[0].resident == {0} and not serving.loop.open
    assert serving.loop.outcomes["failed"] == 2
    serving.come(ExpertJob(2, expert=4), 2.0)  # it is tried again
    assert serving.begin(0, 2.0).tier == "disk"
