"""One process of a cluster: the scheduler or a server, as its number says.

    python -m moe_edge.cluster.process SPEC.json NUMBER

The supervisor (`run.py`) writes the spec and starts these. What goes wrong is one line
on stderr and the exit code of its error. A process ends without Python's own shutdown:
`jax.distributed` would wait there for processes that may be gone.
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
from typing import Any

from moe_edge.cluster.network.namespaces import DEVICE
from moe_edge.cluster.node.membership import (
    free_port,
    initialise_jax,
    publish_roster,
    read_roster,
    say_hello,
)
from moe_edge.cluster.options import PRECISIONS
from moe_edge.cluster.roles import FIRST, MAIN, SCHEDULER, SHADOW
from moe_edge.cluster.spec import Spec, began_file, facts_of
from moe_edge.cluster.transport.base import Address, Transport
from moe_edge.cluster.transport.keys import read_secret
from moe_edge.cluster.transport.messages.transport import MessagesTransport
from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError, MoeEdgeError, RequestError
from moe_edge.core.heap import keep_heap

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


def transport_of(spec: Spec, number: int, port: int = 0) -> MessagesTransport:
    """The transport of a process started here."""
    options, secret = spec.options, read_secret(spec.secret)
    where = spec.hosts[number], port
    return MessagesTransport(number, secret, *where, delay_ms=options.delay_ms)


@dataclasses.dataclass
class Joined:
    """A process that has joined: its transport, and the checkpoint's reader."""

    transport: Transport
    lobby: Lobby
    reader: Any
    began: Path

    def become(self, node) -> None:
        """From now on the node answers; the scheduler is told."""

        def on_lost(peer: int, kind: str) -> None:
            node.on_lost(peer, kind)
            if peer == SCHEDULER:  # the main thread may be at something long
                timer = threading.Timer(LEAVE_S, leave, (peer, kind))
                timer.daemon = True
                timer.start()

        transport = self.transport
        transport.on_lost, self.lobby.inner = on_lost, node
        if not isinstance(transport, MessagesTransport):
            self.lobby.inner = transport.answering(node)
        self.began.touch()
        self.transport.post(SCHEDULER, "there")
        node.run()


def leave(peer: int, kind: str) -> None:
    """Ends this process at once: it has lost another without which nothing goes on."""
    if peer == SCHEDULER:
        print(f"error: the scheduler is lost ({kind}); this process ends", flush=True)
        os._exit(3)


def join(spec: Spec, number: int, began: Path) -> Joined:
    """Says hello, waits for all others, and connects to them."""
    options, lobby = spec.options, Lobby()
    transport = transport_of(spec, number)
    transport.serve(lobby)
    transport.on_lost = lambda peer, kind: None  # before joining, hellos notice it
    facts = facts_of(options) | {"address": dataclasses.astuple(transport.address)}
    say_hello(transport, spec.address, facts, options.join_timeout_s)
    transport.on_lost = leave
    timeout_s = options.join_timeout_s
    try:
        # The scheduler ends by its own error if others do not come.
        welcome = lobby.welcome.get(timeout=timeout_s + START_S)
    except queue.Empty:
        raise ConfigError(
            f"the scheduler has taken this process in, but not begun within "
            f"{timeout_s + START_S:g} s; see its log"
        ) from None
    initialise_jax(welcome["jax"], options.processes, number, timeout_s)
    keep_heap()
    if options.transport == "jax":
        from moe_edge.cluster.transport.collectives.transport import (
            CollectivesTransport,
        )

        transport = CollectivesTransport(transport)
    for process, address in read_roster(timeout_s).items():
        if process not in (SCHEDULER, number):
            transport.connect(process, address)
    return Joined(transport, lobby, open_checkpoint(options.checkpoint), began)


def run_server(spec: Spec, number: int, began: Path) -> None:
    """A server of Prism's: process `number` of 1 .. N."""
    joined = join(spec, number, began)
    from moe_edge.cluster.prism.server import Server, ServerOptions

    options, config = spec.options, joined.reader.config
    slots = options.slots_of(len(config.moe_layers) * config.moe.num_experts)
    own = ServerOptions(
        slots=slots[number - FIRST],
        max_batch=options.max_batch,
        partial=options.combine == "partial",
        call_s=options.call_s,
        device=None if options.link_mbps is None else DEVICE,
    )
    weights = dense_weights(joined.reader)
    where = number - FIRST, options.servers, joined.reader, weights
    joined.become(Server(*where, joined.transport, own))


def dense_weights(reader):
    """All of the model but its experts."""
    from moe_edge.engine.weights import load_weights

    is_hf = isinstance(reader, HfReader)
    return load_weights(reader, check_finite=is_hf, with_experts=False)


def run_role(spec: Spec, number: int, began: Path) -> None:
    """A process of OD-MoE's: main, shadow or a worker."""
    joined = join(spec, number, began)
    options, reader, transport = spec.options, joined.reader, joined.transport
    from moe_edge.cluster.od_moe.groups import Groups, slots_of
    from moe_edge.predict.shadow import Shadow

    config, K = reader.config, reader.config.moe.top_k
    groups = Groups(options.workers, options.groups, K)
    precision = options.shadow if options.shadow in PRECISIONS else "full"
    periods = Shadow(precision, options.token_period, options.kv_period)
    if options.shadow == "random":
        periods = Shadow(precision, 0, 0)  # nothing to align
    if number == MAIN:
        from moe_edge.cluster.od_moe.main import MainNode

        weights = dense_weights(reader)
        node = MainNode(number, reader, weights, transport, groups, periods)
    elif number == SHADOW:
        from moe_edge.cluster.od_moe.shadow_node import ShadowNode
        from moe_edge.engine.shadow import make_shadow
        from moe_edge.offload.store import HostStore

        shadow = None
        if options.shadow in PRECISIONS:
            shadow = make_shadow(dense_weights(reader), precision, HostStore(reader))
        shape = config.moe_layers, config.moe.num_experts, K
        node = ShadowNode(
            *(number, transport, groups, *shape, shadow, periods),
            speculative=options.departure == "speculative",
            seed=options.seed,
        )
    else:
        from moe_edge.cluster.node.programs import PlacedPrograms
        from moe_edge.cluster.od_moe.worker import Worker, WorkerNode
        from moe_edge.offload.store import device_dtype

        programs = PlacedPrograms(config, device_dtype(reader.dtype))
        slots = slots_of(K, options.workers, options.groups)
        node = WorkerNode(number, transport, Worker(reader, programs, slots))
    joined.become(node)


def run_scheduler(spec: Spec) -> None:
    """Process 0."""
    from moe_edge.cluster.node.membership import Reception

    options, address = spec.options, spec.address
    if options.mode == "prism":
        from moe_edge.cluster.prism.programme import PrismProgramme as Programme
    else:
        from moe_edge.cluster.od_moe.programme import OdProgramme as Programme
    started_s = time.perf_counter()
    transport = transport_of(spec, SCHEDULER, address.calls)
    reception = Reception(facts_of(options), options.processes)
    programme = Programme(options, transport, reception, Path(spec.folder))
    transport.serve(programme.scheduler)
    members = reception.wait(options.join_timeout_s)
    jax_address = f"{address.host}:{free_port(spec.hosts[SCHEDULER])}"
    addresses = {n: Address(*fields["address"]) for n, fields in members.items()}
    for process, where in addresses.items():
        transport.connect(process, where)
        transport.post(process, "welcome", {"jax": jax_address})
    timeout_s = options.join_timeout_s
    initialise_jax(jax_address, options.processes, SCHEDULER, timeout_s)
    publish_roster(addresses)
    import jax

    jax.local_devices()  # the servers' backends wait for that of every process
    programme.scheduler.wait_for_all("there", START_S, may_lose=False)
    took_s = time.perf_counter() - started_s
    print(f"{options.processes - 1} processes joined in {took_s:.1f} s")
    programme.run(members)
    programme.scheduler.tell_all("stop")
    transport.close()


def main(arguments: list[str]) -> int:
    """Runs a process to its end: its exit code."""
    spec, number = Spec.load(arguments[0]), int(arguments[1])
    began = began_file(arguments[0], number)
    die_with_parent(spec.parent)
    wake_in_time()
    try:
        if number == SCHEDULER:
            run_scheduler(spec)
        elif spec.options.mode == "prism":
            run_server(spec, number, began)
        else:
            run_role(spec, number, began)
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


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
