"""A node of a cluster without others: what it posts is kept."""

from moe_edge.cluster.node.node import Order
from moe_edge.cluster.roles import SCHEDULER


class Posts:
    """A transport that keeps what is posted, and whom it forgets."""

    def __init__(self):
        self.told, self.forgotten = [], []

    def post(self, peer, name, fields=None, arrays=None):
        self.told.append((peer, name, fields))

    def disconnect(self, peer):
        self.forgotten.append(peer)


def told(node, *orders):
    """Runs a node to its end with orders that are there already."""
    # In its turn: behind the others.
    node.orders["end"] = Order(later=lambda *_: node.stop({}, {}))
    for name, fields in (*orders, ("end", {})):
        node.control(SCHEDULER, name, fields, {})
    node.run()
