"""What all nodes do with orders, losses and their own faults."""

import pytest

from moe_edge.cluster.node.node import Node, NodeFault, Order, SchedulerLost
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.core.checks import RequestError
from tests.support.live_run import wait_until
from tests.support.posts import Posts, told


class Counting(Node):
    """Counts; dies of letters."""

    def __init__(self):
        super().__init__(4, Posts())
        self.sum, self.suspected, self.found, self.lost = 0, [], [], []

    def make_orders(self):
        own = {"add": Order(later=self.add), "notes": Order(self.notes)}
        return super().make_orders() | own

    def add(self, fields, arrays):
        self.sum += 0 + fields["n"]

    def notes(self, fields, arrays):
        return {"sum": self.sum}, {}

    def peer_suspected(self, peer):
        self.suspected.append(peer)

    def peer_found(self, peer):
        self.found.append(peer)

    def peer_lost(self, peer):
        self.lost.append(peer)


def test_orders_are_done_in_order_and_finish_is_confirmed():
    node = Counting()
    told(node, ("add", {"n": 2}), ("add", {"n": 3}), ("finish", {}))
    assert node.sum == 5
    assert node.transport.told == [(SCHEDULER, "finished", None)]
    assert node.control(SCHEDULER, "notes", {}, {}) == ({"sum": 5}, {})


def test_unknown_order_is_refused_and_the_node_lives():
    node = Counting()
    with pytest.raises(RequestError, match="process 4 knows no order 'subtract'"):
        node.control(SCHEDULER, "subtract", {}, {})
    told(node, ("add", {"n": 2}))
    assert node.sum == 2


def test_fault_in_an_order_ends_the_node_with_one_line(capsys):
    node = Counting()
    with pytest.raises(
        NodeFault, match="^process 4, add: TypeError: unsupp[^\n]*$"
    ) as e:
        told(node, ("add", {"n": "two"}))
    assert e.value.exit_code == 1
    assert "Traceback" in capsys.readouterr().err  # the log has more


def test_lost_scheduler_ends_the_node_and_a_lost_peer_does_not():
    node = Counting()
    node.on_lost(2, "hung")
    node.control(SCHEDULER, "lost", {"server": 4}, {})
    assert node.suspected == [2] and node.lost == [5]
    assert node.transport.told == [(SCHEDULER, "lost", {"who": 1, "kind": "hung"})]
    assert node.transport.forgotten == [5]
    told(node)
    node = Counting()
    node.on_lost(SCHEDULER, "dead")
    with pytest.raises(SchedulerLost, match="the scheduler is dead"):
        node.run()


@pytest.mark.parametrize("name", ["strike", "lost", "stop", "away", "back", "reach"])
def test_orders_of_others_than_the_scheduler_are_refused(name):
    node = Counting()
    with pytest.raises(RequestError, match="process 3 gives no orders"):
        node.control(3, name, {"kind": "kill", "server": 1}, {})
    assert not node.lost and not node.transport.forgotten


def test_an_accusing_drill_says_that_all_others_hang():
    node = Counting()  # process 4 is server 3
    fields = {"kind": "accuse", "servers": [0, 2, 3]}
    node.control(SCHEDULER, "strike", fields, {})
    assert node.transport.told == [
        (SCHEDULER, "lost", {"who": who, "kind": "hung"}) for who in (0, 2)
    ]
    assert not node.suspected  # it goes on asking them


@pytest.mark.parametrize("reached", [True, False])
def test_a_node_connects_to_a_process_again_and_reports(reached):
    node, asked = Counting(), []
    node.transport.reach = lambda *where: asked.append(where) or reached
    node.control(SCHEDULER, "reach", {"server": 1, "within_s": 3.0}, {})
    wait_until(lambda: node.transport.told)
    assert asked == [(2, 3.0)]
    assert node.found == [2] * reached
    report = {"who": 1, "reached": reached}
    assert node.transport.told == [(SCHEDULER, "reached", report)]


class GoingBack(Counting):
    """Asks to be taken in again unless the scheduler is dead."""

    asked = 0

    def goes_back(self, kind):
        return kind == "hung"

    def go_back(self):
        self.asked += 1


def test_a_node_that_is_off_the_list_ends_or_goes_back():
    node = Counting()
    node.control(SCHEDULER, "away", {}, {})
    node.run()
    back = GoingBack()
    back.control(SCHEDULER, "away", {}, {})
    back.on_lost(SCHEDULER, "hung")
    told(back, ("add", {"n": 2}))  # it goes on meanwhile
    assert back.asked == 2 and back.sum == 2
    back = GoingBack()
    back.on_lost(SCHEDULER, "dead")
    with pytest.raises(SchedulerLost, match="the scheduler is dead"):
        back.run()


def test_a_node_connects_to_one_that_is_back():
    node, asked = Counting(), []
    node.transport.reach = lambda *where: asked.append(where)
    node.control(SCHEDULER, "back", {"server": 1, "within_s": 3.0}, {})
    wait_until(lambda: asked)
    assert asked == [(2, 3.0)] and not node.transport.told
