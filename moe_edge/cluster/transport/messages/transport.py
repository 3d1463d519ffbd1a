"""The transport: ZeroMQ over TCP, and TLS for blocks, keys from the secret.

A process binds two ports, one for calls and control, one for blocks, so that calls
never queue behind blocks. To each peer it has three connections: for the calls of
the engine's thread (`calls.py`), for control (`watch.py`, which also
notices lost peers) and for fetching blocks (`fetch.py`). `answer.py` and `blocks.py`
answer. All are encrypted, and admit only who knows the secret.
"""

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import zmq

from moe_edge.cluster.transport.base import (
    HUNG_S,
    Address,
    Handlers,
    PeerLost,
    Traffic,
)
from moe_edge.cluster.transport.keys import tls_context
from moe_edge.cluster.transport.messages.answer import Answering, answer_calls
from moe_edge.cluster.transport.messages.blocks import BlockServer, listen
from moe_edge.cluster.transport.messages.calls import Calls
from moe_edge.cluster.transport.messages.fetch import Fetcher
from moe_edge.cluster.transport.messages.peer_link import PeerLink, monitored
from moe_edge.cluster.transport.messages.sockets import (
    LINGER_MS,
    SLICE_MS,
    Sockets,
    numeric_host,
)
from moe_edge.cluster.transport.messages.stream import hang_up
from moe_edge.cluster.transport.messages.watch import Watch
from moe_edge.cluster.transport.wire import Kind
from moe_edge.cluster.transport.wire_control import encode_control
from moe_edge.core.checks import ConfigError

REFUSES_S = 1.0  # for an answer to an attempt to connect
END_S = 1.0  # for a thread to end; one that is stuck in a handler is left behind

_left_behind: list[zmq.Context] = []  # kept, as their end would wait for such threads


class Transport:
    """Calls, blocks and control from one process to its peers; a context manager.

    `start` and `finish` (`Calls`) belong to one thread, the engine's. All else, such as
    `fetch` (`Fetcher`), may be called by any thread but those that answer (`Handlers`),
    which never wait for a peer.

    Args:
      peer: own number.
      secret: shared by all (`keys.py`).
      host: the address to bind, and that peers are told.
      calls_port, blocks_port: 0 takes a free one.
      hung_s: silence after which a peer is lost.
    Attributes:
      address: where it listens.
      traffic: what it has carried.
      on_lost: called once for a lost peer with its number and "dead" or "hung", by a
        thread of the transport; must return soon.
    Raises:
      ConfigError: a port in use, a host that is not of this machine, a bad value.
    """

    def __init__(
        self,
        peer: int,
        secret: bytes,
        host: str = "127.0.0.1",
        calls_port: int = 0,
        blocks_port: int = 0,
        hung_s: float = HUNG_S,
    ):
        address = numeric_host(host)
        self.peer, self.traffic, self._secret = peer, Traffic(), secret
        self.on_lost: Callable[[int, str], None] | None = None
        self._links: dict[int, PeerLink] = {}
        self._addresses: dict[int, Address] = {}
        self._answering: list[Answering | BlockServer] = []
        self._closing = threading.Lock()
        self._closed = False
        self._sockets = Sockets(peer, secret, hung_s)
        self._watch = Watch(self._sockets, self.traffic, self._report, self._retire)
        given = self._link, self._watch.lose, self.traffic
        self._calls = Calls(*given)
        self.start, self.finish = self._calls.start, self._calls.finish
        self.fetch = Fetcher(peer, tls_context(secret, False), *given).fetch
        try:
            self._router, calls_port = self._sockets.router(address, calls_port)
            self._listener = listen(address, blocks_port)
        except ConfigError:
            self._watch.abandon()
            self._sockets.context.destroy(linger=0)
            raise
        self.address = Address(host, calls_port, self._listener.getsockname()[1])
        self._watch.start()

    def __enter__(self) -> "Transport":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def serve(self, handlers: Handlers) -> None:
        """Begins to answer; messages that came before have waited."""
        answer, after = answer_calls(handlers), getattr(handlers, "answered", None)
        calls = Answering(self._router, answer, self.traffic, after)
        context = tls_context(self._secret, True)
        blocks = BlockServer(self._listener, context, handlers, self.traffic)
        self._answering += calls, blocks
        for thread in self._answering:
            thread.start()

    def connect(self, peer: int, address: Address) -> None:
        """Makes a peer known, instead of an earlier one of that number."""
        self.disconnect(peer)
        calls = self._sockets.dealer(b"c")
        control = self._sockets.dealer(b"o", LINGER_MS)
        link = PeerLink(peer, address, calls, control, monitored(calls))
        for socket in (calls, control):
            socket.connect(f"tcp://{address.host}:{address.calls}")
        self._links[peer], self._addresses[peer] = link, address
        self._watch.add(link)

    def disconnect(self, peer: int) -> None:
        """Forgets a peer; what waits for it gets `PeerLost`, nothing is reported."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._watch.forget(link)

    def reach(self, peer: int, deadline_s: float) -> bool:
        """Whether a peer is connected; a lost one is connected to again, if it can be.

        If not, the peer is forgotten as by `disconnect`, but may be reached later.
        """
        until_s = time.monotonic() + deadline_s
        with self._closing:  # two threads may miss the same connection
            link, address = self._links.get(peer), self._addresses.get(peer)
            if address is not None and (link is None or link.lost is not None):
                if not self._closed:
                    self.connect(peer, address)
                    link = self._links.get(peer)  # another thread may drop it
        # Handshakes and heartbeats wait for no call that the peer computes.
        while link is not None and link.lost is None:
            if link.state == "ready":
                return True
            if time.monotonic() > until_s:
                break
            time.sleep(SLICE_MS / 1000)
        with self._closing:
            if self._links.get(peer) is link:  # not one that another thread has made
                self.disconnect(peer)
        return False

    def refuses(self, peer: int) -> bool:
        """Whether nobody listens where a peer was (`Address.refuses`)."""
        address = self._addresses.get(peer)
        return address is not None and address.refuses(REFUSES_S)

    def control(
        self,
        peer: int,
        name: str,
        fields: Mapping | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        deadline_s: float = 5.0,
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """Asks a peer; in order with the posts to it.

        Returns:
          Fields and arrays of its answer.
        Raises:
          PeerLost, Refused: as `Calls.finish`.
        """
        given = name, fields or {}, arrays or {}
        return self._watch.ask(self._link(peer), given, deadline_s)

    def post(
        self,
        peer: int,
        name: str,
        fields: Mapping | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Tells a peer without an answer; to a lost or unknown peer: nothing."""
        frame = encode_control(Kind.POST, 0, name, fields or {}, arrays or {})
        if (link := self._links.get(peer)) is not None:
            self._watch.post(link, frame)

    def close(self) -> None:
        """Ends all threads and connections; may be called again."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        for thread in self._answering:
            thread.stop()
        ended = [_ended(thread, END_S) for thread in self._answering]
        self._watch.stop()
        self._listener.close()
        until_s = time.monotonic() + END_S
        while not _ended(self._watch, 0.01) and time.monotonic() < until_s:
            self._calls.bury(0.01)  # `finish` gives up within a slice
        if all(ended) and self._watch.clean:
            self._sockets.context.destroy()
        else:
            _left_behind.append(self._sockets.context)

    def _link(self, peer: int) -> PeerLink:
        """A peer's link.

        Raises:
          PeerLost: it is lost or unknown.
        """
        link = self._links.get(peer)
        if link is None:
            raise PeerLost(peer, "dead", "is not connected")
        link.check()
        return link

    # The watch's thread.

    def _report(self, link: PeerLink) -> None:
        if self.on_lost is not None:
            self.on_lost(link.peer, link.lost().kind)

    def _retire(self, link: PeerLink) -> None:
        """Closes the sockets of others, or leaves that to who is using them."""
        self._calls.retire(link.calls)
        if (stream := link.blocks) is not None:
            hang_up(stream)
        if link.block_lock.acquire(blocking=False):
            try:
                if link.blocks is not None:
                    link.blocks.close()
            finally:
                link.block_lock.release()


def _ended(thread: threading.Thread, wait_s: float) -> bool:
    """Whether a thread has ended, after waiting a while."""
    if thread is threading.current_thread():
        return False
    thread.join(wait_s)
    return not thread.is_alive()
