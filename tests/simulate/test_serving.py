"""Serving in computed time: one timeline by hand, and what load does."""

import dataclasses

import pytest

from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.step_costs import CostTable, StepCosts
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.continuous_one_k import ContinuousOneK
from moe_edge.schedule.fifo import Fifo
from moe_edge.schedule.figures import summarise
from moe_edge.schedule.full_batch import FullBatch
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.request import Request
from moe_edge.simulate.serving import ComputedServer, SlotSteps

# A prompt token takes 1 s; a step of n rows at K takes n + K seconds.
COSTS = StepCosts(
    CostTable((1, 2), (1, 2), [[2, 3], [3, 4]]),
    CostTable((1, 2), (1, 2), [[1, 1], [2, 2]]),
    "by hand",
)


def job(number, arrival_s, prompt, new, floor=1, **more):
    return Request(
        number,
        arrival_s=arrival_s,
        floor=floor,
        prompt_tokens=prompt,
        new_tokens=new,
        **more,
    )


def times(policy, *jobs, answers=None, cancelled=None):
    steps = SlotSteps(sizes(512, max_context=4096))
    server = ComputedServer(RequestLoop(policy), COSTS, steps=steps, answers=answers)
    served = server.run(jobs, cancelled)
    return server, {n: (s.admitted_s, s.first_s, s.last_s) for n, s in served.items()}


def test_rows_join_between_steps():
    # 0: prompt until 3, its second token until 5. 1 came meanwhile: its prompt from 5
    # to 7; both rows, mean K 1.5, until 10.5; 0 has all. Then 1 alone, K 2.
    server, seen = times(Continuous(2), job(0, 0, 3, 3), job(1, 1, 2, 3, floor=2))
    assert seen == {0: (0, 3, 10.5), 1: (3, 7, 13.5)}
    assert server.num_steps == 4 and server.busy_s == 13.5
    assert server.served[1].k_sum == 6 and server.served[0].k_least == 1


def test_a_batch_runs_to_its_end():
    _, seen = times(Fifo(2), job(0, 0, 3, 3), job(1, 1, 2, 3, floor=2))
    assert seen == {0: (0, 3, 7), 1: (7, 9, 15)}


def test_a_batch_that_waits_begins_by_itself():
    _, seen = times(FullBatch(3, max_wait_s=5.0), job(0, 1, 1, 1), job(1, 2, 1, 1))
    assert seen == {0: (6, 8, 8), 1: (6, 8, 8)}


def test_what_comes_at_once_is_seen_at_once():
    _, seen = times(Continuous(2), job(0, 0, 1, 1), job(1, 0, 1, 1))
    assert seen == {0: (0, 2, 2), 1: (0, 2, 2)}


def test_texts_end_deadlines_pass_and_clients_go():
    server, seen = times(
        Continuous(1),
        *(job(0, 0, 1, 9), job(1, 0, 1, 1, deadline_s=4.0), job(2, 0, 1, 1)),
        *(job(3, 20, 1, 9, deadline_s=23.5), job(4, 20, 1, 9), job(5, 40, 1, 9)),
        answers={0: 3, 5: 1},
        cancelled={2: 2.0, 4: 29.0},
    )
    # 0 ends after three tokens at 5; 1 was given up when that step was over.
    assert seen[0] == (0, 1, 5) and seen[1] == seen[2] == (None, None, None)
    # 3 runs when its deadline passes: its answer is what it has at the step's end.
    assert seen[3] == (20, 21, 25)
    assert seen[4] == (25, 26, 28)  # its client goes during the next step
    assert seen[5] == (40, 41, 41) and server.busy_s == 5 + 5 + 5 + 1
    outcomes = [server.served[n].state for n in range(6)]
    assert outcomes[:3] == ["finished", "expired", "cancelled"]
    assert outcomes[3:] == ["finished", "cancelled", "finished"]


def test_the_token_of_a_step_in_which_a_deadline_passes_is_kept():
    # 0: its prompt until 1, a step until 3 and one until 5, in which its deadline
    # passes and somebody comes, so that deadlines are looked at.
    server, seen = times(
        Continuous(2), job(0, 0, 1, 9, deadline_s=3.5), job(1, 4, 1, 1)
    )
    assert seen == {0: (0, 1, 5), 1: (5, 6, 6)}
    assert server.served[0].made == 3 and server.served[0].state == "finished"


def sizes(prefill_chunk, prompt_rows=4, max_context=64):
    given = {"prefill_chunk": prefill_chunk, "prompt_rows": prompt_rows}
    return SlotSizes(max_rows=8, max_context=max_context, **given)


def step(steps, *running):
    """Ids of the rows that decode, then (id, start, stop) of chunks."""
    decode, chunks, *_ = steps.next(running)
    for job in (*(chunk.job for chunk in chunks if chunk.is_last), *decode):
        job.made += 1
    return [job.id for job in decode], [(j.id, a, b) for j, a, b in chunks]


def test_prompts_are_cut_and_run_a_few_together():
    lengths = 150, 200, 30, 9, 2, 5
    a, b, c, d, e, f = jobs = [job(i, 0, n, 9) for i, n in enumerate(lengths)]
    for each in jobs:
        each.state = "running"
    steps = SlotSteps(sizes(128, prompt_rows=2, max_context=1024))
    assert step(steps, a, b) == ([], [(0, 0, 128)])  # long ones run alone
    assert step(steps, a, b, c) == ([], [(0, 128, 150)])  # 1 and 2 wait for this one
    assert step(steps, a, b, c) == ([0], [(1, 0, 128)])
    assert step(steps, a, b, c) == ([0], [(1, 128, 200)])
    assert step(steps, *jobs[:5]) == ([0, 1], [(2, 0, 30), (3, 0, 9)])
    assert step(steps, *jobs) == ([0, 1, 2, 3], [(4, 0, 2), (5, 0, 5)])
    assert step(steps, a, f) == ([0, 5], [])


def test_prompts_together_are_no_larger_than_a_chunk():
    of = sizes(256, max_context=1024).prompts_together
    assert of([9, 30, 70]) == 2 and of([64, 50, 60, 64, 64]) == 4 and of([65, 70]) == 1
    assert of([256, 256]) == of([900, 900]) == of([3]) == 1


def test_small_sessions_of_prompts_leave_the_chunk_as_it_is():
    for context, chunk in ((3000, 128), (6144, 64), (4096, 512), (512, 512)):
        given = sizes(chunk, prompt_rows=8, max_context=context)
        assert given.chunk == chunk and given.prompt_capacities[-1] >= context
        assert all(M <= chunk or M % chunk == 0 for M in given.prompt_capacities)


def test_prompts_of_requests_that_ended_are_dropped():
    a, b = jobs = [job(i, 0, 9, 9) for i in range(2)]
    for each in jobs:
        each.state = "running"
    steps = SlotSteps(sizes(4))
    assert step(steps, a) == ([], [(0, 0, 4)])
    a.state = "cancelled"
    assert step(steps, b) == ([], [(1, 0, 4)])


def test_prompts_that_run_together_cost_their_padding():
    # 0 and 1 take four rows of 32 positions: 9 tokens of 1 s, and the 48 s that this
    # shape costs more than that of one prompt.
    shapes = [[1, 32, 256, 2.0], [4, 32, 256, 50.0]]
    costs = dataclasses.replace(COSTS, shapes=shapes)
    steps = SlotSteps(sizes(512, max_context=4096))
    server = ComputedServer(RequestLoop(Continuous(2)), costs, steps=steps)
    served = server.run([job(0, 0, 3, 1), job(1, 0, 6, 1), job(2, 99, 5, 1)])
    assert [served[n].first_s for n in range(3)] == [57, 57, 104]


def test_rows_cost_the_session_in_which_they_run():
    # A step of one row takes 2 s, and 3 s more while the session is of the capacity
    # that 1 needs; so it is until 1 has gone and nobody waits.
    batches = [[1, 1, 256, 1.0], [2, 1, 256, 1.0], [1, 1, 512, 4.0], [2, 1, 512, 4.0]]
    costs = dataclasses.replace(COSTS, batches=batches)
    steps = SlotSteps(sizes(512, max_context=4096))
    server = ComputedServer(RequestLoop(Continuous(2)), costs, steps=steps)
    served = server.run([job(0, 0, 1, 4), job(1, 1, 256, 9)], {1: 263.0})
    # 0: its prompt until 1, a step until 3, then 1's prompt until 259; a step of both
    # until 265 (3 + 3 s), and one of 0 alone, in a session made smaller.
    assert (served[0].first_s, served[0].last_s) == (1, 267)
    assert (served[1].first_s, served[1].state) == (259, "cancelled")
    # From its 257th position on a row needs the larger one.
    served = server.run([job(2, 1000, 254, 5)])
    assert (served[2].first_s, served[2].last_s) == (1254, 1254 + 2 * 2 + 2 * 5)


def test_steps_of_other_rows_take_longer():
    # Both join at 0: 1 + 1 s of prompts, then a step of both that is new, one that has
    # begun ahead, and one of 1 alone, in a smaller session.
    costs = dataclasses.replace(COSTS, changed_s=10.0, moved_s=100.0)
    steps = SlotSteps(sizes(512, max_context=4096))
    server = ComputedServer(RequestLoop(Continuous(2)), costs, steps=steps)
    served = server.run([job(0, 0, 1, 3), job(1, 0, 1, 4)])
    assert served[0].first_s == 2 and served[0].last_s == 2 + (3 + 10) + 3
    assert served[1].last_s == served[0].last_s + 2 + 10 + 100


def test_a_step_begun_at_another_k_is_made_twice():
    # 0 takes steps of 2 s. From 14 s on 1 waits, whose floor is 2: both run at it, so
    # the step of 0 at K 1 that has begun is in vain, and its next one takes 3 s.
    for changed_s, runs_ahead, more_s in ((1, True, 2), (9, True, 9), (1, False, 1)):
        costs = dataclasses.replace(COSTS, changed_s=changed_s, runs_ahead=runs_ahead)
        steps = SlotSteps(sizes(512, max_context=4096))
        server = ComputedServer(RequestLoop(ContinuousOneK(2)), costs, steps=steps)
        at_s = 3.5 + changed_s
        served = server.run([job(0, 0, 1, 9), job(1, at_s, 1, 1, floor=2)])
        # 0: 1 s, a new step of 2 s and one more, in which 1 comes; then 1's prompt.
        begun_s = 1 + (2 + changed_s) + 2
        assert served[1].first_s == begun_s + (3 + more_s) + 1


def test_more_keys_take_longer():
    # A row has its prompt's tokens, and the new ones that it attends to.
    costs = dataclasses.replace(COSTS, keys=2.0, key_s=0.5, prompt_key_s=0.25)
    steps = SlotSteps(sizes(4, max_context=64))
    server = ComputedServer(RequestLoop(Continuous(2)), costs, steps=steps)
    served = server.run([job(0, 0, 6, 3)])
    first_s = 4 + 2 + 0.25 * 2 * 4  # two chunks: 2 tokens see 4 of the first
    assert served[0].first_s == first_s
    # Steps of 2 s, of 7 and of 8 keys instead of 2.
    assert served[0].last_s == first_s + 2 * 2 + 0.5 * (5 + 6)


def test_higher_load_waits_longer():
    def mean_wait_s(gap_s):
        jobs = [job(i, gap_s * i, 1, 2) for i in range(50)]
        _, seen = times(Continuous(2), *jobs)
        waits = [first - gap_s * i for i, (_, first, _) in seen.items()]
        return sum(waits) / len(waits)

    assert mean_wait_s(4.0) == pytest.approx(1)
    assert mean_wait_s(4.0) < mean_wait_s(2.5) < mean_wait_s(1.5)


def test_jobs_are_served_at_their_own_floors():
    first = Request(0, arrival_s=0.5, floor=8, prompt_tokens=3, new_tokens=4)
    second = Request(1, arrival_s=0.5, floor=16, prompt_tokens=1, new_tokens=2)
    server = ComputedServer(RequestLoop(Continuous(2)), COSTS)
    figures = summarise(list(server.run([first, second]).values()))
    assert figures["outcomes"] == {"finished": 2} and figures["floor_violations"] == 0
    assert figures["mean_k"] == (4 * 8 + 2 * 16) / 6
