"""What holds under every policy, on random requests in computed time."""

import collections

import pytest

from moe_edge.core.checks import RequestError
from moe_edge.engine.sizes import SlotSizes
from moe_edge.schedule.decisions import Recorder, replay
from moe_edge.schedule.loop import Limits, RequestLoop
from moe_edge.schedule.policy import OUTCOMES, SCHEDULERS
from moe_edge.schedule.request import Request
from moe_edge.simulate.serving import ComputedServer, SlotSteps
from tests.support.serving import COSTS, policies, random_load

EACH = pytest.mark.parametrize("policy", policies(), ids=list(SCHEDULERS))
SEEDS = range(6)
LIMITS = Limits(max_waiting=12, kv_budget_bytes=2000)
# One capacity for all rows, as in a session of slots.
SLOTS = Limits(12, 2400, lambda each: len(each) * max(each, default=0))


def computed(loop, load, watch=None):
    """A server whose prompts of up to 60 tokens take two chunks."""
    sizes = SlotSizes(max_rows=4, max_context=128, prefill_chunk=32, prompt_rows=4)
    steps, answers = SlotSteps(sizes), load.answers
    return ComputedServer(loop, COSTS, steps=steps, answers=answers, watch=watch)


def serve(policy, seed, limits=LIMITS, drop=(), **more):
    load = random_load(seed, **more)
    loop = RequestLoop(policy, limits=limits)
    server = computed(loop, load)
    cancelled = {n: t for n, t in load.cancelled.items() if n not in drop}
    return load, loop, server.run(load.jobs, cancelled)


@EACH
@pytest.mark.parametrize("limits", [LIMITS, SLOTS], ids=["sum", "slots"])
def test_each_request_ends_once_within_budget_and_never_below_its_floor(policy, limits):
    steps = []

    def watch(loop, step, now_s):
        (lane,) = loop.lanes
        assert lane.kv_bytes() <= limits.kv_budget_bytes
        assert len(lane.running) <= policy.max_batch
        places = limits.max_waiting + policy.max_batch
        assert loop.num_waiting + len(lane.running) <= places
        assert all(job.floor <= job.k <= 32 for job in lane.running)
        arrived = sum(job.state != "new" for job in watch.jobs)
        assert arrived == len(loop.open) + sum(loop.outcomes.values())
        running = {job.id for job in lane.running}
        for jobs in ([chunk.job for chunk in step.chunks], step.decode):
            ids = {job.id for job in jobs}
            assert len(ids) == len(jobs) and ids <= running
        steps.append(len(running))

    seen = collections.Counter()
    for seed in SEEDS:
        load = random_load(seed)
        watch.jobs = load.jobs
        loop = RequestLoop(policy, limits=limits)
        server = computed(loop, load, watch)
        served = server.run(load.jobs, load.cancelled)
        outcomes = collections.Counter(one.state for one in served.values())
        assert outcomes == +collections.Counter(loop.outcomes)
        assert not loop.open and loop.lanes[0].idle
        for job in load.jobs:
            one = served[job.id]
            expected = min(load.answers.get(job.id, 99), job.new_tokens)
            if one.state == "finished" and job.deadline_s is None:
                assert one.made == expected
            assert one.made <= expected
            assert not one.made or one.k_least >= job.floor
        seen += outcomes
    assert set(seen) == set(OUTCOMES) - {"failed"}  # all of them occur
    assert max(steps) == policy.max_batch


@EACH
def test_who_waited_too_long_is_next_or_nobody(policy):
    """The law of max_wait_s, where batches begin and where rows join."""
    bound_s, late = 0.5, []

    def watch(loop, step, now_s):
        (lane,) = loop.lanes
        before = watch.waiting
        watch.waiting = list(lane.waiting)
        joined = [job for job in before if job.state == "running"]
        waited = [job for job in before if job.state in ("waiting", "running")]
        if not joined or not waited:
            return
        oldest = min(waited, key=lambda job: job.arrival_s)
        if now_s - oldest.arrival_s > bound_s:
            late.append(oldest.id)
            assert oldest in joined

    class Watched(RequestLoop):
        def begin_step(self, number, now_s):
            watch.waiting = list(self.lanes[0].waiting)
            return super().begin_step(number, now_s)

    for seed in SEEDS:
        load = random_load(seed, gap_s=0.01)
        loop = Watched(policy, limits=Limits(kv_budget_bytes=1500))
        computed(loop, load, watch).run(load.jobs, load.cancelled)
    assert len(late) > 20


@EACH
def test_who_enters_late_keeps_the_place_of_its_arrival(policy):
    """A server reads a long prompt while others that came after it enter."""
    loop = RequestLoop(policy)
    jobs = [Request(i, arrival_s=t, floor=8) for i, t in enumerate((0.9, 0.95, 0.0))]
    more = [Request(3 + i, arrival_s=0.97, floor=4) for i in range(4)]
    for job in (*jobs[:2], *more, jobs[2]):
        loop.admit(job, loop.arrive(job, 1.0), 1.0)
    assert [job.id for job in loop.lanes[0].waiting] == [2, 0, 1, 3, 4, 5, 6]
    assert jobs[2] in loop.begin_step(0, 1.2)


@EACH
def test_cancelling_one_changes_no_outcome_of_the_others(policy):
    """Without deadlines and a bound of the queue: these depend on what others do."""
    for seed in range(3):
        load, _, before = serve(policy, seed, Limits(kv_budget_bytes=2000), count=30)
        tokens = {n: one.made for n, one in before.items()}
        for victim in load.cancelled:
            _, _, after = serve(
                policy, seed, Limits(kv_budget_bytes=2000), drop=[victim], count=30
            )
            for number, one in after.items():
                if number == victim or load.jobs[number].deadline_s is not None:
                    continue
                if number not in load.cancelled:
                    assert one.state == before[number].state == "finished"
                    assert one.made == tokens[number]


@EACH
@pytest.mark.parametrize("stage", ["waiting", "stepping", "between"])
def test_slot_and_cache_of_a_cancelled_request_are_free_within_two_steps(policy, stage):
    loop = RequestLoop(policy, limits=LIMITS)
    jobs = [Request(i, floor=8, kv_bytes=400, new_tokens=9) for i in range(5)]
    for job in jobs:
        loop.admit(job, loop.arrive(job, 0.0), 0.0)
    loop.begin_step(0, 1.0)
    if stage == "between":
        loop.end_step(0, 1.1, [])
    victim = jobs[4 if stage == "waiting" else 1]
    assert loop.cancel(victim.id) is victim and loop.cancel(victim.id) is None
    if stage != "between":
        loop.end_step(0, 1.2, [])
    lane = loop.lanes[0]
    assert victim not in (*lane.running, *lane.waiting)
    assert lane.kv_bytes() == 400 * (4 if stage == "waiting" else 3)
    running = loop.begin_step(0, 1.2)
    if stage != "waiting" and policy.name.startswith(("continuous", "elastic")):
        assert jobs[4] in running  # it took the free slot


@EACH
def test_recorded_decisions_are_made_again(policy):
    load = random_load(1)
    recorder = Recorder(RequestLoop(policy, limits=LIMITS))
    computed(recorder, load).run(load.jobs, load.cancelled)
    fresh = RequestLoop(policy, limits=LIMITS)
    count = replay(recorder.lines, fresh, Request)
    assert count == len(recorder.lines) > 200
    assert fresh.outcomes == recorder.loop.outcomes


def test_replay_names_the_first_decision_that_differs():
    load, by_name = random_load(1), {p.name: p for p in policies()}
    recorder = Recorder(RequestLoop(by_name["continuous"]))
    computed(recorder, load).run(load.jobs)
    other = RequestLoop(by_name["continuous_one_k"])
    with pytest.raises(RequestError, match=r"decision \d+ is .*\[\d+, 24\].*recorded"):
        replay(recorder.lines, other, Request)


@EACH
def test_the_same_requests_give_the_same_run(policy):
    runs = [{n: vars_of(s) for n, s in serve(policy, 2)[2].items()} for _ in range(2)]
    assert runs[0] == runs[1]


def vars_of(served):
    return [getattr(served, name) for name in served.__slots__]
