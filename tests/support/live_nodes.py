"""The processes of a cluster in one process: nodes in threads, on real sockets.

Every part is the real one (engine, transport over loopback, scheduler), but for
`jax.distributed`, and all nodes share compiled programs. A node is killed as a process
is: its transport closes without a word, and its thread ends.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from moe_edge.cluster.node.node import Node
from moe_edge.cluster.roles import FIRST, SCHEDULER
from moe_edge.cluster.scheduler.scheduler import Scheduler
from moe_edge.cluster.transport.base import PeerLost
from moe_edge.cluster.transport.messages.transport import Transport

SECRET = b"a secret of the tests"
WAIT_S = 120.0  # for what a loaded machine may take


class Killed(Exception):
    """Ends the threads of a node that a test kills."""


def lose_way(transport: Transport, peer: int) -> None:
    """A connection breaks: heartbeats are missing."""
    link = transport._links.get(peer)
    if link is not None:
        transport._watch.lose(link, lambda: PeerLost(peer, "hung"))


class LiveNode:
    """A node and its thread.

    Args:
      make: the node of a transport.

    Attributes:
      error: what its thread ended by, if anything.
    """

    def __init__(self, number: int, make: Callable[[Transport], Node]):
        self.error, self.killed = None, False
        self.transport = Transport(number, SECRET)
        self.node = make(self.transport)
        self.transport.on_lost = self.node.on_lost
        self.transport.serve(self.node)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            self.transport.close()  # as the end of its process would

    def kill(self) -> None:
        """Ends it at once: nothing that it does from now on leaves it."""
        self.killed = True
        self.transport.close()
        self.node.fail(Killed())

    def lose_way_to(self, peer: int, for_good: bool = False) -> None:
        """Its connection to another process breaks; for good: a new one fails, too."""
        transport = self.transport
        if for_good:
            reach = transport.reach
            transport.reach = lambda to, within_s: to != peer and reach(to, within_s)
        lose_way(transport, peer)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class LiveNodes:
    """The scheduler in the thread of the test, and all others; a context manager.

    Attributes:
      transport, scheduler: of process 0.
      live: the others, in order.
    """

    scheduler: Scheduler

    def __init__(self):
        self.transport = Transport(SCHEDULER, SECRET)
        self.live: list[LiveNode] = []

    def start(self, live: Iterable[LiveNode]) -> None:
        """Joins them, each with each, and starts them; the scheduler is there."""
        self.live = list(live)
        self.transport.serve(self.scheduler)
        transports = [self.transport, *(one.transport for one in self.live)]
        for transport in transports:
            for other in transports:
                if other is not transport:
                    transport.connect(other.peer, other.address)
        for one in self.live:
            one.start()

    @property
    def errors(self) -> list[BaseException]:
        """What nodes ended by."""
        return [one.error for one in self.live if one.error is not None]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.scheduler.end()
        for one in self.live:
            if not self.scheduler.is_alive(one.node.number - FIRST):
                one.node.stop({}, {})  # it may be on its way back
            if not one.killed:
                one.join()
        transports = [self.transport, *(one.transport for one in self.live)]
        with ThreadPoolExecutor(len(transports)) as pool:  # each waits for its threads
            list(pool.map(Transport.close, transports))
        if kind is None:
            self.check()

    def check(self) -> None:
        """What must hold at the end of a test that has not failed."""
        assert not self.errors, self.errors[0]
