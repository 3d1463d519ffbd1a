"""A process that the scheduler tells what to do: orders, questions, losses, its end.

Its table (`Node.orders`) says what each order does: at once, in a thread of the
transport, which also answers, or by the main thread in its turn, between pieces of the
node's own work; an order may have both. What goes wrong in the main thread ends the
node.
"""

import contextlib
import os
import queue
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from moe_edge.cluster.drills import PAUSE, PAUSE_S, SIGNALS
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError, RequestError

IDLE_S = 0.5  # how often a node without work looks around


class SchedulerLost(MoeEdgeError):
    """The scheduler is gone: the run cannot continue."""

    exit_code = 3


class NodeFault(MoeEdgeError):
    """A fault of ours in a node; its log has more."""

    exit_code = 1


class Order(NamedTuple):
    """What a node does when it is told, each by `(fields, arrays)`.

    Attributes:
      now: at once; what it returns is the answer.
      later: in its turn.
      of_others: whether other processes than the scheduler may give it.
    """

    now: Callable | None = None
    later: Callable | None = None
    of_others: bool = False


class Node:
    """One process; also what the transport answers with (`Handlers`).

    Attributes:
      number: of the process.
      idle: whether there is nothing to do but orders.
    """

    idle = True

    def __init__(self, number: int, transport: Transport):
        self.number, self.transport = number, transport
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self.orders = self.make_orders()

    def make_orders(self) -> dict[str, Order]:
        """What it can be told, by name; a subclass adds its own."""
        return {
            "time": Order(self._time),
            "strike": Order(self._strike),
            "reach": Order(self._reach),
            "back": Order(self.back),
            "lost": Order(self._lost),
            "stop": Order(self.stop),
            "away": Order(self._away),
            "warm": Order(later=self.warm),
            "finish": Order(later=self.finish),
        }

    # What the transport answers with, in its threads.

    def call(self, peer, call):
        raise RequestError(f"process {self.number} computes no experts")

    def block(self, layer, block):
        return None

    def control(self, peer: int, name: str, fields: dict, arrays: dict):
        order = self.orders.get(name)
        if peer != SCHEDULER and not (order and order.of_others):
            raise RequestError(f"process {peer} gives no orders; the scheduler does")
        if order is None:
            raise RequestError(f"process {self.number} knows no order {name!r}")
        answer = None if order.now is None else order.now(fields, arrays)
        if order.later is not None:
            self._waiting.put((name, fields, arrays))
        return answer or ({}, {})

    def _time(self, fields, arrays):
        return {"now_s": time.perf_counter()}, {}

    def _strike(self, fields, arrays) -> None:
        """A drill."""
        kind = fields["kind"]
        if kind == PAUSE:  # nobody in here could wake it
            wake = f"sleep {PAUSE_S:g}; kill -CONT {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True)
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
            return
        for server in fields["servers"]:
            if FIRST + server != self.number:
                self.tell("lost", {"who": server, "kind": "hung"})

    def _reach(self, fields, arrays) -> None:
        """The scheduler reaches a process that this one calls lost."""
        where = FIRST + fields["server"], fields["within_s"]
        threading.Thread(target=self._connect, args=where, daemon=True).start()

    def back(self, fields, arrays) -> None:
        """A process that was off the list is on it again."""
        where = FIRST + fields["server"], fields["within_s"]
        threading.Thread(target=self.transport.reach, args=where, daemon=True).start()

    def _connect(self, peer: int, within_s: float) -> None:
        """Connects to a process again if it must; in a thread of its own."""
        reached = self.transport.reach(peer, within_s)
        if reached:
            self.peer_found(peer)
        self.tell("reached", {"who": peer - FIRST, "reached": reached})

    def _lost(self, fields, arrays) -> None:
        """The scheduler has taken a process off the list."""
        peer = FIRST + fields["server"]
        self.transport.disconnect(peer)
        self.peer_lost(peer)

    def stop(self, fields, arrays) -> None:
        self._stopped.set()
        self._wake()

    def _away(self, fields, arrays) -> None:
        """The scheduler has taken this process off the list."""
        if self.goes_back("hung"):
            self.go_back()
        else:
            self.stop(fields, arrays)

    def goes_back(self, kind: str) -> bool:
        """Whether it asks to be taken in again when it has lost the scheduler so."""
        return False

    def go_back(self) -> None:
        """Asks to be taken in again; returns at once."""

    def on_lost(self, peer: int, kind: str) -> None:
        """The transport lost a process, or a call found it lost."""
        if peer == SCHEDULER:
            if self.goes_back(kind):
                self.go_back()
            else:
                self.fail(SchedulerLost(f"the scheduler is {kind}; this process ends"))
        else:
            self.peer_suspected(peer)
            self.tell("lost", {"who": peer - FIRST, "kind": kind})

    def peer_suspected(self, peer: int) -> None:
        """This process does not reach another one; the scheduler will say what is so:
        `peer_lost` or, if they are connected again, `peer_found`."""

    def peer_found(self, peer: int) -> None:
        """A suspected process is there after all."""

    def peer_lost(self, peer: int) -> None:
        """The scheduler has taken another process off the list."""

    def fail(self, error: BaseException) -> None:
        """Ends `run` by an error; any thread may call it."""
        if not self._stopped.is_set():
            self._error = error
            self._stopped.set()
            self._wake()

    def _wake(self) -> None:
        self._waiting.put(("wake", {}, {}))

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
            fault = NodeFault(text)
            self.fail(fault)
            raise fault from error

    def tell(self, name: str, fields: dict | None = None, arrays=None) -> None:
        """Tells the scheduler."""
        self.transport.post(SCHEDULER, name, fields, arrays)

    # The main thread.

    def run(self) -> None:
        """Until the scheduler says stop.

        Raises:
          SchedulerLost: it is gone. Whatever a thread of this node died of.
        """
        while not self._stopped.is_set():
            self._attend()
            self.work()
        if self._error is not None:
            raise self._error

    def _attend(self) -> None:
        """Orders that have come; waits for one if there is nothing else to do."""
        idle = self.idle
        while not self._stopped.is_set():
            try:
                name, fields, arrays = self._waiting.get(idle, IDLE_S if idle else None)
            except queue.Empty:
                return
            idle = False
            if name != "wake":
                with self.faults_end_it(name):
                    self.orders[name].later(fields, arrays)

    def warm(self, fields, arrays) -> None:
        """Compiles what requests need."""
        started_s = time.perf_counter()
        self.compile(fields, arrays)
        self.tell("warm", {"seconds": time.perf_counter() - started_s})

    def compile(self, fields, arrays) -> None:
        """All programs of this node; arrays: sizes of what will be asked."""

    def finish(self, fields, arrays) -> None:
        """All requests have ended; what was on its way has come."""
        self.tell("finished")

    def work(self) -> None:
        """A piece of the node's own work."""
