"""What the nodes of OD-MoE share: orders of the scheduler, done by the main thread.

The transport's threads put what comes into a queue; the main thread does it in order
and goes on with its own work in between. What goes wrong in any thread ends the node.
"""

import os
import queue
import threading

from moe_edge.cluster.asked import SIGNALS
from moe_edge.cluster.server import SCHEDULER, SchedulerLost
from moe_edge.cluster.transport import Transport
from moe_edge.core.checks import RequestError

IDLE_S = 0.5  # how often a node without work looks around


class Node:
    """One process. A subclass has a method `do_NAME(fields, arrays)` for every order.

    Attributes:
      number: of the process; its name in posts.
    """

    answered = ("notes",)  # orders that are answered at once, in the transport's thread

    def __init__(self, number: int, transport: Transport):
        self.number, self.transport = number, transport
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    # What the transport answers with.

    def call(self, peer, call):
        raise RequestError(f"process {self.number} computes no experts")

    def block(self, layer, block):
        return None

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        if name == "strike":  # a drill
            os.kill(os.getpid(), SIGNALS[fields["kind"]])
        elif name == "lost":  # the scheduler has taken a process off the list
            self.transport.disconnect(1 + fields["server"])
            self.peer_lost(1 + fields["server"], "dead")
            return {}, {}
        elif name == "stop":
            self._stopped.set()
        elif name in self.answered:
            return getattr(self, f"do_{name}")(fields, arrays)
        self._orders.put((name, fields, arrays))
        return {}, {}

    def on_lost(self, peer: int, kind: str) -> None:
        """The transport lost a process."""
        if peer == SCHEDULER:
            self.fail(SchedulerLost(f"the scheduler is {kind}; this process ends"))
        else:
            self.peer_lost(peer, kind)

    def peer_lost(self, peer: int, kind: str) -> None:
        """Another process than the scheduler is lost; in a thread of the transport.

        May be told twice of one.
        """

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stopped.set()
        self._orders.put(("stop", {}, {}))

    def tell(self, name: str, fields: dict | None = None, arrays=None) -> None:
        """Tells the scheduler."""
        fields = {"server": self.number - 1} | (fields or {})
        self.transport.post(SCHEDULER, name, fields, arrays)

    # The main thread.

    def run(self) -> None:
        """Until the scheduler says stop, or is lost."""
        while not self._stopped.is_set():
            self._attend()
            self.work()
        if self._error is not None:
            raise self._error

    def _attend(self) -> None:
        idle = self.idle
        while not self._stopped.is_set():
            try:
                name, fields, arrays = self._orders.get(idle, IDLE_S if idle else None)
            except queue.Empty:
                return
            idle = False
            if name != "stop":
                getattr(self, f"do_{name}")(fields, arrays)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do but orders."""
        return True

    def work(self) -> None:
        """A piece of the node's own work."""
