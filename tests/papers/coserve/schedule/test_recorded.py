"""A recorded run is repeated batch by batch."""

import pytest

from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.schedule.recorded import Plan, Prescheduled, Recording
from moe_edge.papers.coserve.simulate.coe import CoeSimulator
from moe_edge.papers.coserve.workload.coe_tasks import board_requests
from tests.papers.coserve.support.experts import (
    come,
    lanes_of,
    small_board,
    small_machine,
    step,
)


@pytest.mark.parametrize("name", ["coserve", "affinity"])
def test_prescheduled_run_makes_the_same_batches(name):
    graph = small_board(0)
    requests = board_requests(graph, 150, 0.01)

    def setup():
        return make_setup(name, graph, small_machine(), graph.probability_E())

    first = setup()
    first.policy = recording = Recording(first.policy)
    run = CoeSimulator(graph, first).run(requests)
    plain = CoeSimulator(graph, setup()).run(requests)
    assert run.steps == plain.steps  # recording changes nothing
    again = setup()
    again.policy = Prescheduled(
        again.costs, again.pools, graph.follow, plan=recording.plan
    )
    repeated = CoeSimulator(graph, again).run(requests)
    assert repeated.answers == run.answers
    for lane in range(len(again.pools)):
        batches = [
            [(step.expert, step.requests) for step in one.steps if step.lane == lane]
            for one in (run, repeated)
        ]
        assert batches[0] == batches[1]
    assert repeated.time_s == pytest.approx(run.time_s, rel=0.02)


def test_lane_waits_until_its_next_batch_is_there():
    loop, pools = lanes_of("coserve", [[0]])
    given = loop.policy
    plan = Plan({(0, 0): 0, (1, 1): 0, (2, 0): 0}, {0: [[(2, 0), (0, 0)], [(1, 1)]]})
    loop.policy = Prescheduled(given.costs, pools, {}, plan=plan)
    come(loop, 0, 0)
    come(loop, 1, 1)
    assert step(loop)[0] == []  # 2 is not there yet
    come(loop, 2, 0)
    assert step(loop)[0] == [0, 2] and step(loop)[0] == [1] and step(loop)[0] == []
