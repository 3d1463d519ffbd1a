"""The process of a worker: its faults end it, bad calls do not."""

import pytest

from moe_edge.cluster.node.node import NodeFault
from moe_edge.core.checks import RequestError
from moe_edge.papers.od_moe.cluster.worker import WorkerNode
from tests.support.posts import Posts, told


class FaultyWorker:
    """Fails as told."""

    def __init__(self, error):
        self.error = error

    def compute(self, call):
        raise self.error

    def expect(self, count, layer, experts):
        raise self.error


def test_fault_in_a_workers_answers_ends_it_but_a_bad_call_does_not(capsys):
    node = WorkerNode(5, Posts(), FaultyWorker(RequestError("no such layer")))
    with pytest.raises(RequestError, match="no such layer"):
        node.call(1, None)
    told(node)
    fields = {"layers": [(1, 1, [])]}
    for what, act in (
        ("a call", lambda node: node.call(1, None)),
        ("load", lambda node: node.control(2, "load", fields, {})),
    ):
        node = WorkerNode(5, Posts(), FaultyWorker(IndexError("pop\nfrom")))
        line = f"^process 5, {what}: IndexError: pop from$"
        with pytest.raises(NodeFault, match=line):  # whoever asked is told, too
            act(node)
        with pytest.raises(NodeFault, match=line):
            node.run()
