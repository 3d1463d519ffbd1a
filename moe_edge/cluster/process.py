"""One process of a cluster: the scheduler or a server, as its number says.

    python -m moe_edge.cluster.process SPEC.json NUMBER

The supervisor (`run.py`) writes the spec and starts these. What goes wrong is one line
on stderr and the exit code of its error. A process ends without Python's own shutdown,
in which XLA's threads may still compute and crash.
"""

import ctypes
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from moe_edge.cluster.model_checks import open_at_k
from moe_edge.cluster.modes import mode_of
from moe_edge.cluster.node.membership import say_hello
from moe_edge.cluster.options import ClusterOptions
from moe_edge.cluster.roles import SCHEDULER
from moe_edge.cluster.spec import Spec, began_file, facts_of
from moe_edge.cluster.transport.base import Address
from moe_edge.cluster.transport.keys import read_secret
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import ConfigError, MoeEdgeError, RequestError
from moe_edge.core.heap import keep_heap
from moe_edge.core.tables import load

if TYPE_CHECKING:
    from moe_edge.cluster.node.node import Node

START_S = 120.0  # to load
LEAVE_S = 3.0  # to end by itself once the scheduler is lost


class Lobby:
    """Answers of a server that has not joined yet; then those of the server.

    Attributes:
      inner: the server, once it is there.
      welcome: what the scheduler says when all have come.
    """

    def __init__(self):
        self.inner = None
        self.welcome: queue.SimpleQueue[dict] = queue.SimpleQueue()

    def _server(self):
        if self.inner is None:
            raise RequestError("this server has not joined yet; ask again later")
        return self.inner

    def call(self, peer, call):
        return self._server().call(peer, call)

    def block(self, layer, block):
        return None if self.inner is None else self.inner.block(layer, block)

    def control(self, peer, name, fields, arrays):
        if name == "welcome" and peer == SCHEDULER:
            self.welcome.put(fields)
            return {}, {}
        return self._server().control(peer, name, fields, arrays)

    def answered(self):
        after = getattr(self.inner, "answered", None)
        if after is not None:
            after()


def transport_of(spec: Spec, number: int, port: int = 0) -> Transport:
    """The transport of a process started here."""
    options, secret = spec.options, read_secret(spec.secret)
    where = spec.hosts[number], port
    return Transport(number, secret, *where, hung_s=options.hung_s)


def leave(peer: int, kind: str) -> None:
    """Ends this process at once: it has lost another without which nothing goes on."""
    if peer == SCHEDULER:
        print(f"error: the scheduler is lost ({kind}); this process ends", flush=True)
        os._exit(3)


def join(spec: Spec, number: int, lobby: Lobby) -> Transport:
    """Says hello, waits for all others, and connects to them."""
    options = spec.options
    transport = transport_of(spec, number)
    transport.serve(lobby)
    facts = facts_of(spec) | {"address": dataclasses.astuple(transport.address)}
    say_hello(transport, spec.address, facts, options.join_timeout_s, leave)
    timeout_s = options.join_timeout_s
    try:
        # The scheduler ends by its own error if others do not come.
        welcome = lobby.welcome.get(timeout=timeout_s + START_S)
    except queue.Empty:
        raise ConfigError(
            f"the scheduler has taken this process in, but not begun within "
            f"{timeout_s + START_S:g} s; see its log"
        ) from None
    keep_heap()
    for process, where in welcome["roster"]:
        if process != number:
            transport.connect(process, Address(*where))
    return transport


def node_of(spec: Spec, number: int, transport: Transport) -> "Node":
    """A process that is not the scheduler."""
    options = spec.options
    make_node = load(mode_of(options).node)
    return make_node(number, options, transport, open_at_k(options))


def programme_of(options: ClusterOptions) -> type:
    """What the scheduler does."""
    return load(mode_of(options).programme)


def run_node(spec: Spec, number: int, began: Path, make_node=node_of) -> None:
    """All others than the scheduler."""
    lobby = Lobby()
    transport = join(spec, number, lobby)
    node = make_node(spec, number, transport)

    def on_lost(peer: int, kind: str) -> None:
        node.on_lost(peer, kind)
        # The main thread may be at something long.
        if peer == SCHEDULER and not node.goes_back(kind):
            timer = threading.Timer(LEAVE_S, leave, (peer, kind))
            timer.daemon = True
            timer.start()

    transport.on_lost, lobby.inner = on_lost, node
    began.touch()
    transport.post(SCHEDULER, "there")
    node.run()


def run_scheduler(spec: Spec, choose=programme_of) -> None:
    """Process 0."""
    from moe_edge.cluster.node.membership import Reception
    from moe_edge.cluster.scheduler.requests import NobodyLeft

    options, address = spec.options, spec.address
    started_s = time.perf_counter()
    transport = transport_of(spec, SCHEDULER, address.calls)
    reception = Reception(facts_of(spec), options.processes)
    make_programme = choose(options)
    programme = make_programme(options, transport, reception, Path(spec.folder))
    transport.serve(programme.scheduler)
    members = reception.wait(options.join_timeout_s)
    addresses = {n: Address(*fields["address"]) for n, fields in members.items()}

    def on_lost(peer: int, kind: str) -> None:  # the others would wait for it
        who = options.name_of(peer)
        print(f"error: {who} is {kind} before all have begun", flush=True)
        os._exit(NobodyLeft.exit_code)

    transport.on_lost = on_lost
    roster = [(n, dataclasses.astuple(where)) for n, where in addresses.items()]
    for process, where in addresses.items():
        transport.connect(process, where)
        transport.post(process, "welcome", {"roster": roster})
    programme.scheduler.wait_for_all("there", START_S, may_lose=False)
    transport.on_lost = programme.scheduler.on_lost
    took_s = time.perf_counter() - started_s
    print(
        f"{options.processes - 1} processes joined in {took_s:.1f} s; now they load "
        "weights and compile"
    )
    programme.run(members)
    programme.scheduler.end()
    transport.close()


def main(arguments: list[str], make_node=node_of, choose=programme_of) -> int:
    """Runs a process to its end: its exit code.

    Args:
      make_node: (spec, number, transport) -> a process that is not the scheduler.
      choose: options -> the class of what the scheduler does.
    """
    spec, number = Spec.load(arguments[0]), int(arguments[1])
    began = began_file(arguments[0], number)
    die_with_parent(spec.parent)
    wake_in_time()
    try:
        if number == SCHEDULER:
            run_scheduler(spec, choose)
        else:
            run_node(spec, number, began, make_node)
    except (MoeEdgeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
        return 1 if code == 2 and began.exists() else code  # its input was good
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wake_in_time() -> None:
    """Sleeps end when they are to, not up to 50 us later (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK, also of coming threads


def die_with_parent(parent: int) -> None:
    """Nothing stays running when the supervisor is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it went before that
            os._exit(1)


def end(code: int) -> None:
    """Without Python's own shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
