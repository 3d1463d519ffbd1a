"""The engine of experts: equal to the simulator where things take the same time."""

import collections
import dataclasses
import threading

import numpy as np
import pytest

from moe_edge.papers.coserve.coe.engine import ExpertEngine
from moe_edge.papers.coserve.coe.executor import Outcome
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.simulate.coe import CoeSimulator
from moe_edge.papers.coserve.workload.coe_tasks import CoeRequest, board_requests
from tests.papers.coserve.support.experts import small_board, small_machine
from tests.support.computed_time import ComputedTime
from tests.support.slow_cases import slow

IMAGE = np.zeros((1, 1, 3), np.float32)


class Timed:
    """Executors that take the time which the costs say, and find what was drawn."""

    def __init__(self, setup, simulator, clock, broken=()):
        self.setup, self.simulator, self.clock = setup, simulator, clock
        self.broken, self.threads = set(broken), collections.Counter()

    def run(self, batch, images):
        assert len(images) == len(batch.jobs)
        begin_s = self.clock.now()
        ready_s = self.simulator._ready_s(batch, begin_s)
        if batch.tier and batch.expert in self.broken:
            self.clock.sleep_until(ready_s)
            return Outcome(ready_s - begin_s, None, f"expert {batch.expert} is gone")
        costs = self.setup.costs[batch.lane]
        end_s = ready_s + costs.batch_s(batch.expert, len(batch.jobs))
        self.clock.sleep_until(end_s)
        judged = [self.simulator._judge(job) for job in batch.jobs]
        return Outcome(ready_s - begin_s, judged)


class Watched(ExpertEngine):
    """Checks the account after every batch."""

    def _take(self, batch, *given):
        super()._take(batch, *given)
        for pool in self.setup.pools:
            assert pool.used_bytes <= pool.budget_bytes


def serve(name, graph, requests, images=None, broken=(), one_disk=True, **more):
    """The engine's run with injected times, and the simulator's."""
    machine = small_machine(one_disk=one_disk)

    def setup():
        return make_setup(name, graph, machine, graph.probability_E(), **more)

    simulated = CoeSimulator(graph, setup(), one_disk).run(requests)
    mine = setup()
    judge = CoeSimulator(graph, setup(), one_disk)  # its disk and its verdicts only
    judge.requests = requests
    clock = ComputedTime(1 + len(mine.pools))
    executor = Timed(mine, judge, clock, broken)
    images = images or [IMAGE] * len(requests)
    engine = Watched(graph, mine, [executor] * len(mine.pools), images, clock)
    return engine.run(requests), simulated


HURRY = {"options": {"max_wait_s": 0.5}}
CASES = [(name, 0.02, True, {}) for name in RECIPES]
CASES += [(name, 0.02, False, {}) for name in RECIPES]
CASES += [
    ("affinity", at_s, one, HURRY) for at_s in (0.02, 0.4) for one in (True, False)
]


@pytest.mark.parametrize(("name", "period_s", "one_disk", "more"), CASES)
@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_engine_does_what_the_simulator_computes(name, period_s, one_disk, more, seed):
    """Of all policies; also with parallel loads, and with a bound of waiting where
    requests come faster than they are served and where they do not."""
    graph = small_board(seed)
    requests = board_requests(graph, 120, period_s, seed)
    ran, simulated = serve(name, graph, requests, one_disk=one_disk, **more)
    assert ran.answers == simulated.answers
    assert ran.switches_by_tier == simulated.switches_by_tier
    assert ran.latency_s == pytest.approx(simulated.latency_s)
    steps = sorted(ran.steps), sorted(simulated.steps)
    assert [s[3:] for s in steps[0]] == [s[3:] for s in steps[1]]
    times = [np.array([s[:3] for s in each]) for each in steps]
    np.testing.assert_allclose(*times, atol=1e-9)
    assert sorted(ran.wait_s) == pytest.approx(sorted(simulated.wait_s))
    assert ran.time_s == pytest.approx(simulated.time_s)


def test_requests_that_cannot_be_judged_fail_alone():
    graph = small_board(0)
    requests = board_requests(graph, 60, 0.02)
    requests.insert(3, CoeRequest("x", 0.05, "unknown", {"seed": 0, "defect": None}))
    images = [IMAGE] * len(requests)
    images[7] = "image has shape (2, 2), expected (1, 1, 3)"
    lost = graph.rules[requests[0].component]
    ran, _ = serve("affinity", graph, requests, images, {lost}, start_empty=True)
    hit = {n for n, r in enumerate(requests) if graph.rules.get(r.component) == lost}
    for number in hit - {7}:
        assert ran.failed[number] == f"expert {lost} is gone"
        assert ran.chains[number] == [] and number not in ran.latency_s
    assert ran.failed[3] == "component 'unknown' has no rule"
    assert ran.failed[7] == images[7]
    assert set(ran.failed) == hit | {3, 7}
    assert set(ran.latency_s) == set(range(len(requests))) - set(ran.failed)
    assert any(step.failed for step in ran.steps)
    assert ran.switches == sum(bool(s.tier) for s in ran.steps if not s.failed)


def test_all_requests_may_fail():
    graph = small_board(0)
    requests = board_requests(graph, 4, 0.02)
    ran, _ = serve("coserve", graph, requests, ["no image"] * 4)
    assert len(ran.failed) == 4 and not ran.steps and ran.time_s == 0


def test_what_a_thread_dies_of_ends_the_run():
    graph = small_board(0)
    requests = board_requests(graph, 50, 0.001)
    setup = make_setup("coserve", graph, small_machine(), graph.probability_E())

    class Dying:
        def run(self, batch, images):
            raise MemoryError("no more")

    # The next one comes in an hour: nobody waits for it.
    late = dataclasses.replace(requests[-1], arrival_s=3600.0)
    images = [IMAGE] * len(requests)
    engine = ExpertEngine(graph, setup, [Dying()] * 3, images)
    with pytest.raises(MemoryError, match="no more"):
        engine.run([*requests[:-1], late])


class Collector:
    """Python's, as an engine uses it; the tests' own objects stay frozen."""

    def __init__(self, frozen):
        self.frozen = frozen

    def get_freeze_count(self):
        return self.frozen

    def collect(self):
        assert not self.frozen

    def freeze(self):
        self.frozen += 100

    def unfreeze(self):
        self.frozen = 0


@pytest.mark.parametrize("frozen", [0, 7])
def test_executor_that_cannot_be_started_ends_those_before(monkeypatch, frozen):
    """And what the process had frozen is so afterwards, no more and no less."""
    collector = Collector(frozen)
    monkeypatch.setattr("moe_edge.papers.coserve.coe.engine.gc", collector)
    graph = small_board(0)
    requests = board_requests(graph, 5, 0.001)
    setup = make_setup("coserve", graph, small_machine(), graph.probability_E())
    start, before = threading.Thread.start, threading.active_count()

    def start_two(thread):
        if thread.name == "executor-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    engine = ExpertEngine(graph, setup, [None] * 3, [IMAGE] * 5)
    with pytest.raises(RuntimeError, match="can't start"):
        engine.run(requests)
    assert threading.active_count() == before and collector.frozen == frozen
