"""A collaboration of experts in computed time: laws on random small boards."""

import collections
import functools
import itertools
import math

import pytest

from moe_edge.core.events import write_events
from moe_edge.papers.coserve.coe.presets import record_bytes, reduced
from moe_edge.papers.coserve.coe.results import run_events
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.schedule.affinity import LATE_LOADS
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.simulate import coe_bounds
from moe_edge.papers.coserve.simulate.coe import CoeSimulator
from moe_edge.papers.coserve.workload.coe_tasks import (
    CoeRequest,
    board_graph,
    board_requests,
)
from tests.papers.coserve.support.experts import (
    loads_by_group,
    small_board,
    small_machine,
)
from tests.support.slow_cases import slow

EACH = pytest.mark.parametrize("name", RECIPES)


@functools.cache
def board(seed, count=150, period_s=0.02):
    graph = small_board(seed)
    return graph, board_requests(graph, count, period_s, seed)


class Watched(CoeSimulator):
    """Checks the account after every event."""

    def _begin(self, lane, now_s):
        super()._begin(lane, now_s)
        self._check()

    def _end(self, batch, judged, now_s):
        super()._end(batch, judged, now_s)
        self._check()

    def _check(self):
        sizes = self._graph.bytes_E
        for pool in self.setup.pools:
            assert pool.used_bytes == sizes[list(pool.resident)].sum()
            assert pool.used_bytes <= pool.budget_bytes
        tier = self.setup.tier
        if tier is not None:
            assert tier.used_bytes <= tier.budget_bytes
            assert not any(e in tier for e in self.setup.pools[0].resident)


def serve(name, seed, machine=None, kind=Watched, count=150, period_s=0.02, **more):
    machine = machine or small_machine()
    graph, requests = board(seed, count, period_s)
    setup = make_setup(name, graph, machine, graph.probability_E(), **more)
    start = setup.start
    simulator = kind(graph, setup, machine.one_disk)
    return graph, requests, start, simulator.run(requests)


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_each_request_is_judged_once_by_its_chain_within_all_budgets(name, seed):
    graph, requests, start, run = serve(name, seed)
    assert set(run.chains) == set(run.latency_s) == set(range(len(requests)))
    for number, request in enumerate(requests):
        first = graph.rules[request.component]
        then = None if request.is_damaged else graph.follow.get(first)
        assert run.chains[number] == [first, *([] if then is None else [then])]
    used = coe_bounds.uses(graph, requests)
    counted = collections.Counter()
    for step in run.steps:
        counted[step.expert] += step.requests
        assert 1 <= step.requests <= 4
    assert counted == used
    assert run.switches >= coe_bounds.distinct(used, start)


@EACH
def test_lanes_and_the_one_disk_do_one_thing_at_a_time(name):
    *_, run = serve(name, 1)
    for lane in range(3):
        steps = [step for step in run.steps if step.lane == lane]
        for before, after in zip(steps, steps[1:], strict=False):
            assert before.end_s <= after.begin_s
    free_s = 0.0
    for step in run.steps:  # as they began
        if step.tier == "disk":
            assert step.begin_s + step.load_s == pytest.approx(
                max(free_s, step.begin_s) + 1.0
            )
            free_s = step.begin_s + step.load_s
        elif step.tier == "host":
            assert step.load_s == pytest.approx(0.3)


@EACH
@pytest.mark.parametrize("max_wait_s", [math.inf, 2.0, 0.5, 0.0])
def test_expert_is_loaded_at_most_once_a_group(name, max_wait_s):
    """A group is a run of a queue; with a bound of waiting also under overload."""
    if name != "affinity" and max_wait_s != math.inf:
        return
    for seed, period_s in itertools.product(range(5), (0.02, 0.1, 0.3)):
        graph, requests = board(seed, 150, period_s)
        options = {"max_wait_s": max_wait_s}
        setup = make_setup(
            *(name, graph, small_machine(), graph.probability_E()), options=options
        )
        loads = loads_by_group(setup)
        run = Watched(graph, setup).run(requests)
        assert max(loads.values()) == 1 and loads.total() == run.switches


def test_time_is_never_below_its_bound():
    for one_disk in (True, False):
        machine = small_machine(one_disk=one_disk)
        for name in ("samba_parallel", "none", "em_ra", "coserve", "affinity"):
            graph, requests, _, run = serve(name, 0, machine)
            setup = make_setup(name, graph, machine, graph.probability_E())
            used, last_s = coe_bounds.uses(graph, requests), requests[-1].arrival_s
            bound_s = coe_bounds.time_s(setup, used, last_s, one_disk)
            assert bound_s <= run.time_s


def test_parallel_loads_take_no_longer_than_those_of_one_disk():
    *_, one = serve("coserve", 0)
    *_, many = serve("coserve", 0, small_machine(one_disk=False))
    assert many.time_s < one.time_s
    assert all(step.load_s in (0.0, pytest.approx(1.0)) for step in many.steps)


@pytest.mark.parametrize("max_wait_s", [0.0, 0.5, 3.0])
def test_who_is_late_by_two_loads_is_next(max_wait_s):
    """Then a lane that begins a group begins that of its oldest."""

    class Passing(Watched):
        def _begin(self, lane, now_s):
            queue = self.serving.loop.lanes[lane].waiting
            oldest = min(queue, key=lambda job: job.arrival_s, default=None)
            overdue = oldest and now_s - oldest.arrival_s > max_wait_s + LATE_LOADS
            overdue = overdue and queue.begun is None
            super()._begin(lane, now_s)
            if overdue:
                assert oldest in self.serving.loop.lanes[lane].running
                self.checked = getattr(self, "checked", 0) + 1

    checked = 0
    for seed in range(3):
        graph, requests = board(seed)
        share_E, options = graph.probability_E(), {"max_wait_s": max_wait_s}
        setup = make_setup("affinity", graph, small_machine(), share_E, options=options)
        simulator = Passing(graph, setup)
        simulator.run(requests)
        checked += simulator.checked
    assert checked > 10


@pytest.mark.parametrize("period_s", [*slow(0.4), 0.5])
def test_at_a_rate_that_can_be_served_nobody_waits_beyond_the_bound_and_one_group(
    period_s,
):
    """With a bound of two loads; a shorter one is below what one burst of loads takes.

    Without a bound it does happen, and the longest wait is shorter with it.
    """
    beyond, longest_s = {}, {}
    for max_wait_s in (2.0, math.inf):
        for seed in range(40):
            run = serve(
                *("affinity", seed),
                **{"count": 300, "period_s": period_s, "kind": CoeSimulator},
                options={"max_wait_s": max_wait_s},
            )[-1]
            group_s = max(step.end_s - step.begin_s for step in run.steps)
            late = sum(wait_s > 2.0 + group_s for wait_s in run.wait_s)
            beyond[max_wait_s] = beyond.get(max_wait_s, 0) + late
            longest_s.setdefault(max_wait_s, []).append(run.longest_wait_s)
    assert beyond[2.0] == 0 < beyond[math.inf]
    assert max(longest_s[2.0]) < 5 < 7 < max(longest_s[math.inf])


def test_next_parts_of_a_batch_are_one_batch():
    graph, _ = board(0)
    first, then = next(iter(graph.follow.items()))
    component = next(name for name, e in graph.rules.items() if e == first)
    image = {"seed": 0, "defect": None}
    requests = [CoeRequest(n, 0.0, component, image) for n in range(4)]
    roomy = small_machine(memory_bytes={"gpu": 5000, "cpu": 5000})
    for name in RECIPES:
        setup = make_setup(name, graph, roomy, graph.probability_E())
        run = Watched(graph, setup).run(requests)
        judged = [step.requests for step in run.steps if step.expert == first]
        detected = [step.requests for step in run.steps if step.expert == then]
        assert sum(judged) == sum(detected) == 4
        if len(judged) == 2 and len(detected) == 2:  # one lane: one, and three
            assert detected[-1] == 3


@pytest.mark.parametrize("max_wait_s", [0.5, 3.0, 60.0])
def test_what_needs_no_look_ahead_is_decided_as_with_it(max_wait_s):
    graph, requests = board(1, 200, 0.02)
    decided, machine = [], small_machine()
    for is_near in (0.0, math.inf):  # in which all are taken to be late
        setup = make_setup(
            *("affinity", graph, machine, graph.probability_E()),
            options={"max_wait_s": max_wait_s},
        )
        setup.policy._alone_s = [one + is_near for one in setup.policy._alone_s]
        decided.append(Watched(graph, setup).run(requests).steps)
    assert decided[0] == decided[1]


def test_component_without_rule_fails_alone():
    graph, requests = board(0)
    strange = CoeRequest("x", 0.0, "unknown", {"seed": 0, "defect": None})
    setup = make_setup("coserve", graph, small_machine(), graph.probability_E())
    run = CoeSimulator(graph, setup).run([strange, *requests])
    assert run.failed == {0: "component 'unknown' has no rule"}
    assert len(run.latency_s) == len(requests)


def test_run_is_the_same_each_time():
    first, second = serve("affinity", 1)[-1], serve("affinity", 1)[-1]
    assert first.steps == second.steps and first.latency_s == second.latency_s


def test_start_empty_needs_every_expert_once_at_least():
    graph, requests, start, run = serve("coserve", 0, start_empty=True)
    assert not start and run.switches >= len(coe_bounds.uses(graph, requests))


def test_events_tell_loads_evictions_and_batches(tmp_path):
    graph, *_, run = serve("samba", 0)
    found = run_events(run, graph.bytes_E.tolist())
    write_events(tmp_path / "events.jsonl", found)
    kinds = collections.Counter(event.kind for event in found)
    assert kinds["transfer"] == run.switches and kinds["compute"] == len(run.steps)
    assert kinds["hit"] == len(run.steps) - run.switches
    assert kinds["evict"] == sum(len(step.leaving) for step in run.steps) > 0
    moved = sum(event.bytes for event in found)
    loaded = [step.expert for step in run.steps if step.tier]
    assert moved == graph.bytes_E[loaded].sum()


def test_reduced_task_shows_what_the_policies_are_for():
    """The bars of throughput and switches on task A1 at a tenth of the times."""
    graph = board_graph(352, record_bytes=record_bytes("reduced"))
    requests, machine = board_requests(graph, 2500, 4e-4), reduced()
    share_E, time_s, switches = graph.probability_E(), {}, {}
    for name in ("samba", "samba_no_tier", "coserve", "affinity"):
        setup = make_setup(name, graph, machine, share_E)
        start = setup.start
        run = CoeSimulator(graph, setup).run(requests)
        time_s[name], switches[name] = run.time_s, run.switches
    needed = coe_bounds.distinct(coe_bounds.uses(graph, requests), start)
    assert time_s["samba"] >= 3 * time_s["coserve"]
    assert time_s["samba"] >= 4.5 * time_s["affinity"]
    assert time_s["samba_no_tier"] >= 9 * time_s["affinity"]
    assert time_s["coserve"] >= 1.15 * time_s["affinity"]
    assert needed <= switches["affinity"] <= 1.25 * needed
