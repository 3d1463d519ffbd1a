"""What the nodes of OD-MoE share: orders of the scheduler, done by the main thread.

The transport's threads put what comes into a queue; the main thread does it in order
and goes on with its own work in between. What goes wrong in any thread ends the node.
"""

import contextlib
import os
import queue
import threading
import traceback

from moe_edge.cluster.prism.server import SCHEDULER, SchedulerLost
from moe_edge.cluster.scheduler.asked import SIGNALS
from moe_edge.cluster.transport.base import Transport
from moe_edge.core.checks import MoeEdgeError, RequestError

IDLE_S = 0.5  # how often a node without work looks around


class NodeFault(MoeEdgeError):
    """A fault of ours in a node; its log has more."""

    exit_code = 1


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
        if peer != SCHEDULER and name in ("strike", "lost", "stop"):
            raise RequestError(f"process {peer} says {name}; only the scheduler may")
        if name == "strike":  # a drill
            os.kill(os.getpid(), SIGNALS[fields["kind"]])
            return {}, {}
        if name == "lost":  # the scheduler has taken a process off the list
            self.transport.disconnect(1 + fields["server"])
            self.peer_lost(1 + fields["server"], "dead")
            return {}, {}
        if name in self.answered:
            return getattr(self, f"do_{name}")(fields, arrays)
        if name == "stop":
            self._stopped.set()
        elif not hasattr(self, f"do_{name}"):
            raise RequestError(f"process {self.number} knows no order {name!r}")
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

    @contextlib.contextmanager
    def faults_end_it(self, what: str):
        """A fault of ours in here, in whatever thread, ends the node with one line."""
        try:
            yield
        except MoeEdgeError:
            raise
        except Exception as error:
            traceback.print_exc()
            line = " ".join(str(error).split())
            text = f"process {self.number}, {what}: {type(error).__name__}: {line}"
            self.fail(NodeFault(text))
            raise self._error from error

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
                with self.faults_end_it(name):
                    getattr(self, f"do_{name}")(fields, arrays)

    def do_finish(self, fields, arrays) -> None:
        """All requests have ended; what was on its way has come."""
        self.tell("finished")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do but orders."""
        return True

    def work(self) -> None:
        """A piece of the node's own work."""
