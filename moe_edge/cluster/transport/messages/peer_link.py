"""A peer as the process that asks it sees it: its sockets, and whether it is lost."""

import dataclasses
import itertools
import ssl
import threading
from collections.abc import Callable

import zmq

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import Address, PeerLost
from moe_edge.cluster.transport.wire import Kind

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_MONITOR_STOPPED
)
_names = itertools.count()


@dataclasses.dataclass(eq=False, slots=True)
class PeerLink:
    """A peer as its caller sees it; sockets belong to different threads."""

    peer: int
    address: Address
    calls: zmq.Socket  # the engine's thread
    control: zmq.Socket  # the watch
    monitor: zmq.Socket  # the watch; ends when `calls` is closed
    blocks: ssl.SSLSocket | None = None  # whoever holds block_lock
    block_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    lost: Callable[[], PeerLost] | None = None  # makes the error to raise
    forgotten: bool = False
    state: str = "connecting"  # then "ready", then "broken"; the watch's
    handshakes: int = 0  # failed ones in a row
    broken_s: float = 0.0

    def check(self) -> None:
        """Raises PeerLost once the peer is lost."""
        if self.lost is not None:
            raise self.lost()


def monitored(calls: zmq.Socket) -> zmq.Socket:
    """A socket that tells what happens to the connections of another."""
    endpoint = f"inproc://moe_edge-monitor-{next(_names)}"
    calls.monitor(endpoint, EVENTS)
    monitor = calls.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(endpoint)
    return monitor


def malformed(peer: int, error: Exception) -> Callable[[], PeerLost]:
    """Makes the loss of a peer that sent what cannot be read."""
    return lambda: PeerLost(peer, "dead", f"is given up: {error}")


def unexpected(kind: Kind, frame: bytes) -> str:
    """What an answer of another kind than expected says."""
    if kind == Kind.REFUSED:
        return f"it reads no more from here: {wire.decode_text(frame)}"
    return f"{kind.name} is no answer to what was asked"
