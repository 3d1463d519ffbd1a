"""Queue policies of a collaboration of experts, by hand."""

import math

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES, chosen_recipes
from tests.papers.coserve.support.experts import come, costs_of, lanes_of, order, step

# A batch of n takes n + 2 s, a load 10 s, at most 3 a batch.


def test_samba_serves_neighbours_of_one_expert_as_they_came():
    loop, _ = lanes_of("samba", [[0]])
    for number, expert in enumerate((0, 0, 1, 0, 0, 0, 0)):
        come(loop, number, expert)
    assert order(loop) == list(range(7))
    batches = [step(loop)[0] for _ in range(5)]
    assert batches == [[0, 1], [2], [3, 4, 5], [6], []]


def test_in_turn_goes_round_the_lanes_into_which_an_expert_fits():
    loop, pools = lanes_of("none", [[], []])
    assert [come(loop, n, 0) for n in range(3)] == [0, 1, 0]
    pools[1].budget_bytes = 0  # nothing fits there any more
    assert [come(loop, n, 0) for n in range(3, 6)] == [0, 0, 0]


def test_arranged_puts_a_request_behind_its_expert():
    loop, _ = lanes_of("em_ra", [[0]])
    for number, expert in enumerate((0, 1, 2, 1, 0)):
        come(loop, number, expert)
    assert order(loop) == [0, 4, 1, 3, 2]


def test_coserve_goes_where_the_longest_queue_stays_shortest():
    loop, _ = lanes_of("coserve", [[0], [1]])
    assert come(loop, 0, 0) == 0  # 3 s there, 13 s elsewhere
    assert come(loop, 1, 2) == 1  # lane 0: 3 + 13; lane 1: 13
    # Expert 0 once more: on lane 0 it adds 1 s. The longest is 13 s in both cases.
    assert come(loop, 2, 0) == 0
    # Expert 3: 4 + 13 on lane 0, 13 + 13 on lane 1.
    assert come(loop, 3, 3) == 0
    # Expert 2 is queued on lane 1: 14 s there; the longest is lane 0's 17.
    assert come(loop, 4, 2) == 1
    assert order(loop, 0) == [0, 2, 3] and order(loop, 1) == [1, 4]
    assert [lane.waiting.added_s for lane in loop.lanes] == [17.0, 14.0]


def test_coserve_prefers_the_fast_executor_and_skips_one_that_is_too_small():
    fast, slow = costs_of(2, k_s=1.0), costs_of(2, k_s=5.0)
    loop, pools = lanes_of("coserve", [[], []], 2, costs=[slow, fast])
    assert come(loop, 0, 0) == 1
    pools[1].budget_bytes = 0
    assert come(loop, 1, 1) == 0


def test_running_batch_counts_until_it_should_end():
    loop, _ = lanes_of("coserve", [[0], []])
    for number in range(3):
        assert come(loop, number, 0) == 0
    loop.begin_step(0, 0.0)  # until 5 s
    policy = loop.policy
    assert policy.until_s == [5.0, 0.0]
    assert policy.left_s(loop.lanes, 2.0) == [3.0, 0.0]
    assert policy.left_s(loop.lanes, 9.0) == [0.0, 0.0]


def test_finished_preliminary_goes_on_as_the_same_request():
    loop, _ = lanes_of("coserve", [[0, 1]], follow={0: 1})
    come(loop, 7, 0)
    come(loop, 8, 0)
    ids, following = step(loop, now_s=4.0, follow={0: 1})
    assert ids == [7, 8] and [(j.id, j.expert) for j in following] == [(7, 1), (8, 1)]
    assert [job.arrival_s for job in following] == [4.0, 4.0] and not loop.open


def test_affinity_goes_where_its_expert_is_until_the_wait_costs_too_many_loads():
    loop, _ = lanes_of("affinity", [[0], [1]], patience_loads=2.0)
    lanes = [come(loop, number, 0) for number in range(30)]
    # Lane 0 has n + 2 s; lane 1 would take 13 s and one more load of patience: 23 s.
    assert lanes[:21] == [0] * 21 and lanes[21] == 1
    assert come(loop, 30, 5) == 1  # nobody has it: the shorter queue
    assert come(loop, 31, 5) == 1


def test_affinity_takes_no_second_copy_while_many_loads_wait_for_the_disk():
    lanes = {}
    for one_disk in (True, False):
        options = {"one_disk": one_disk, "patience_loads": 1.0}
        loop, _ = lanes_of("affinity", [[0], [1]], 9, **options)
        for number, expert in enumerate((5, 6, 7, 8)):  # two loads a lane, of 10 s
            assert come(loop, number, expert) == number % 2
        lanes[one_disk] = [come(loop, number, 0) for number in range(4, 40)].index(1)
    # Lane 0 ends after 26 + 3 + n s. Lane 1, with another load, after 26 + 13 s; if one
    # disk has to make all five loads, after 50 + 3 s.
    assert lanes == {False: 11, True: 25}


def test_affinity_serves_the_resident_first_then_preliminary_ones():
    loop, pools = lanes_of("affinity", [[0]], follow={1: 2})
    for number, expert in enumerate((2, 1, 0, 3, 0)):
        come(loop, number, expert)
    assert step(loop)[0] == [2, 4]  # resident
    assert step(loop)[0] == [1]  # 1 before 2, which follows it
    pools[0].enter(3)
    assert step(loop)[0] == [3]
    assert step(loop)[0] == [0]


def test_affinity_serves_who_would_be_late_behind_the_resident():
    """Those are eight, of 14 s: expert 1 begins at 1 s or at 15 s."""
    for max_wait_s, batches in (
        (14.0, [[0], [1, 2, 3], [4, 5, 6], [7, 8]]),
        (15.0, [[1, 2, 3], [4, 5, 6], [7, 8], [0]]),
    ):
        loop, _ = lanes_of("affinity", [[0]], max_wait_s=max_wait_s)
        come(loop, 0, 1, now_s=0.0)
        for number in range(1, 9):
            come(loop, number, 0, now_s=1.0)
        assert [step(loop, now_s=1.0)[0] for _ in range(4)] == batches


def test_affinity_finishes_the_group_that_it_began_but_takes_in_no_more():
    loop, pools = lanes_of("affinity", [[0]], room=1, max_wait_s=14.0)
    come(loop, 9, 1, now_s=0.0)
    for number in range(5):
        come(loop, number, 0, now_s=0.0)
    assert step(loop, now_s=0.0)[0] == [0, 1, 2]
    come(loop, 5, 0, now_s=1.0)
    # Expert 1 should have begun, but the pool has room for one.
    assert step(loop, now_s=30.0)[0] == [3, 4] and pools[0].resident == {0}
    assert [step(loop, now_s=33.0)[0] for _ in range(2)] == [[9], [5]]


def test_affinity_saves_who_can_be_in_time_then_whoever_is_late_by_two_loads():
    def after(now_s):
        """What is next if 0 came at 0 s, 1 at 20 s; both need loads of 10 s."""
        loop, _ = lanes_of("affinity", [[2]], max_wait_s=15.0)
        come(loop, 0, 0, now_s=0.0)
        come(loop, 1, 1, now_s=20.0)
        come(loop, 2, 2, now_s=20.0)
        come(loop, 3, 2, now_s=20.0)
        return step(loop, now_s=now_s)[0]

    assert after(20.0) == [2, 3]  # 0 is late in any case, 1 is not
    assert after(30.9) == [2, 3]  # 4 s later 1 still begins in time
    assert after(31.5) == [0]  # else it would wait for 20.5 s more than 15 s
    loop, _ = lanes_of("affinity", [[2]], max_wait_s=15.0)
    for number, come_s in enumerate((0.0, 8.0, 20.0)):
        come(loop, number, number, now_s=come_s)
    assert step(loop, now_s=22.0)[0] == [1]  # 2 would make it late; 0 is late anyway


def test_affinity_is_in_time_wherever_the_oldest_first_is():
    """One lane with room for all, all have come: predictions are exact."""
    changed = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        came = sorted(
            (float(t), int(e)) for t, e in rng.uniform((0, 0), (30, 9), (14, 2))
        )
        bound_s = longest_oldest_first_s(came)
        assert longest_affinity_s(came, bound_s + 1e-9) <= bound_s + 2e-9
        changed += longest_affinity_s(came, math.inf) > bound_s + 1e-6
    assert changed > 20


def longest_affinity_s(came, max_wait_s):
    """Longest wait of a group; experts 0 to 2 are there, 6 to 8 follow others."""
    options = {"room": 9, "follow": {3: 6, 4: 7, 5: 8}, "max_wait_s": max_wait_s}
    loop, pools = lanes_of("affinity", [[0, 1, 2]], 9, **options)
    for number, (at_s, expert) in enumerate(came):
        come(loop, number, expert, now_s=at_s)
    now_s, begun_s = 30.0, {}
    while loop.lanes[0].waiting:
        jobs = list(loop.begin_step(0, now_s))
        expert, costs = jobs[0].expert, loop.policy.costs[0]
        begun_s.setdefault(expert, now_s - jobs[0].arrival_s)
        now_s += costs.batch_s(expert, len(jobs))
        if expert not in pools[0]:
            pools[0].enter(expert)
            now_s += costs.load_s[expert]
        loop.end_step(0, now_s, jobs)
    return max(begun_s.values())


def longest_oldest_first_s(came):
    experts, now_s, found = [e for _, e in came], 30.0, {}
    for at_s, expert in came:
        if expert not in found:
            n = experts.count(expert)
            found[expert] = now_s - at_s
            now_s += n + 2 * math.ceil(n / 3) + (10 if expert > 2 else 0)
    return max(found.values())


def test_a_burst_of_loads_makes_somebody_late_in_any_order():
    """Three requests at once, a lane, a load of 10 s each, a bound of 5 s."""
    loop, pools = lanes_of("affinity", [[]], room=3, max_wait_s=5.0)
    for number in range(3):
        come(loop, number, number)
    begun_s, now_s = [], 0.0
    while loop.lanes[0].waiting:
        (job,) = loop.begin_step(0, now_s)
        pools[0].enter(job.expert)
        begun_s.append(now_s)
        now_s += 13.0
        loop.end_step(0, now_s, [job])
    assert begun_s == [0.0, 13.0, 26.0]  # beyond 5 s and one group, whoever is last


def test_recipes_are_chosen_by_name():
    assert chosen_recipes("all") == list(RECIPES)
    assert chosen_recipes("samba, affinity") == ["samba", "affinity"]
    with pytest.raises(ConfigError, match="unknown policy 'best'; known: affinity, co"):
        chosen_recipes("best")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_wait_s", -1.0, "max_wait_s must be 0 or more and finite, got -1.0"),
        ("max_wait_s", math.nan, "max_wait_s must be 0 or more and finite, got nan"),
        ("patience_loads", 0.0, "patience_loads must be positive, got 0.0"),
    ],
)
def test_wrong_options_are_refused(option, value, message):
    with pytest.raises(ConfigError, match=message):
        lanes_of("affinity", [[0]], **{option: value})
