import types

import pytest

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Traffic
from moe_edge.cluster.transport.collectives.lane import padded
from moe_edge.cluster.transport.collectives.transport import CALL, _Answering
from tests.support.cluster_node import Handlers
from tests.support.collective_node import make_call, run_scenario
from tests.support.slow_cases import slow


@pytest.fixture(scope="module", params=slow("processes"))
def found(tmp_path_factory):
    """What four processes made of each other; two are stopped or killed at the end."""
    return run_scenario(tmp_path_factory.mktemp("processes"))


def test_calls_return_rows(found):
    assert found["rows"] == [6.0] * 3
    assert found["many"] == [2.0 * i for i in range(20)]
    assert found["large"] == 10.0
    assert found["together"] == [6.0, 4.0, 2.0]
    assert found["not_here"] is None


def test_error_of_a_handler_reaches_the_caller(found):
    assert found["refused"] == ["Refused", "", "peer 1: no layer 4"]


def test_overdue_answer_is_not_taken_for_another(found):
    text = "peer 1 has not answered in time (overdue)"
    assert found["overdue"] == ["PeerLost", "overdue", text]
    assert found["after_overdue"] == 2.0


def test_calls_in_all_directions_at_once(found):
    assert found["meanwhile"] == [2.0 * i for i in range(60)]
    assert found["called_back"] == [True] * 3


def test_blocks_are_pulled(found):
    assert found["fetched"] == [True] * 3
    assert found["block_not_here"] is False
    kind, _, text = found["other_size"]
    assert kind == "Refused" and "has 200001 bytes, expected 7" in text


def test_stopped_peer_hangs_and_others_go_on(found):
    assert found["stopped"][:2] == ["PeerLost", "hung"]
    assert found["others_then"] == [8.0, 8.0]
    assert found["computes_then"] == 8.0


def test_killed_peer_is_dead_and_others_go_on(found):
    assert found["killed"][:2] == ["PeerLost", "dead"]
    assert found["at_once"][:2] == found["fetch_then"][:2] == ["PeerLost", "dead"]
    assert found["others_last"] == 8.0
    assert found["lost"] == [[3, "hung"], [2, "dead"]]


def test_disconnect_and_close(found):
    text = "peer 1 was disconnected (dead)"
    assert found["disconnected"] == ["PeerLost", "dead", text]


def test_work_that_an_answer_need_not_wait_for_comes_after_it():
    done = []

    class Node(Handlers):
        def answered(self):
            done.append("answered")

    class Line:
        """A lane whose work is done at once, and whose caller asks one call."""

        def submit(self, work):
            work()

        def carry(self, frame, size_bytes, up):
            done.append("asked" if up else "sent")
            return wire.encode_call(1, make_call()) if up else b""

    transport = types.SimpleNamespace(
        peer=1, traffic=Traffic(), lane=lambda caller, callee: Line()
    )
    fields = {"sizes": [padded(100), padded(100)]}
    _Answering(transport, Node()).control(0, CALL, fields, {})
    assert done == ["asked", "sent", "answered"]
    _Answering(transport, Handlers()).control(0, CALL, fields, {})  # may lack it
    assert done[3:] == ["asked", "sent"]
