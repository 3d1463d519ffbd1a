"""Fetches blocks from a peer, over a connection by TLS that is kept.

Not over ZeroMQ: its copies and the encryption of CURVE, which no processor helps with,
took a quarter of a block's time at 500 Mbit/s (docs/measurements.md).
"""

import contextlib
import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import numpy as np

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import PeerLost, Refused, SecretRefused, Traffic
from moe_edge.cluster.transport.messages.peer_link import (
    PeerLink,
    malformed,
    unexpected,
)
from moe_edge.cluster.transport.messages.stream import (
    LENGTH,
    limit,
    receive,
    receive_into,
    send,
)
from moe_edge.cluster.transport.wire import BlockRequest, Kind
from moe_edge.core.checks import ConfigError


class Fetcher:
    """Fetches blocks over the block connections of links, one at a time from each peer.

    Args:
      peer: own number.
      context: of TLS, as a client.
      link, lose: as of `Calls`.
    """

    def __init__(
        self,
        peer: int,
        context: ssl.SSLContext,
        link: Callable[[int], PeerLink],
        lose: Callable[[PeerLink, Callable[[], PeerLost]], None],
        traffic: Traffic,
    ):
        self._peer, self._context = peer, context
        self._link, self._lose, self._traffic = link, lose, traffic
        self._numbers = itertools.count(1)

    def fetch(
        self, peer: int, layer: int, block: int, out: np.ndarray, deadline_s: float
    ) -> bool:
        """Copies a peer's block into `out` (C-contiguous, the size of the record).

        Returns:
          Whether the peer holds it; if not, `out` may be written in part.
        Raises:
          PeerLost, Refused: as `Calls.finish`.
        """
        number, link = next(self._numbers), self._link(peer)
        if not out.flags.c_contiguous:
            raise ConfigError(
                f"out is {out.dtype}{list(out.shape)} with gaps, expected C-contiguous"
            )
        until_s = time.monotonic() + deadline_s
        out_R = out.reshape(-1).view(np.uint8)
        question = wire.encode_block(number, BlockRequest(self._peer, layer, block))
        with self._held(link, deadline_s):
            while True:
                kept = link.blocks is not None
                try:
                    return self._exchange(link, number, question, out_R, until_s)
                except TimeoutError:
                    link.check()
                    raise PeerLost(link.peer, "overdue") from None
                except ssl.SSLCertVerificationError:
                    self._lose(link, lambda: SecretRefused(link.peer, link.address))
                except wire.WireError as error:
                    self._lose(link, malformed(link.peer, error))
                except OSError as error:
                    link.check()
                    if not kept:  # else it may have ended long since
                        text = f"gives no blocks: {error}"
                        raise PeerLost(link.peer, "dead", text) from None
                link.check()

    @contextlib.contextmanager
    def _held(self, link: PeerLink, deadline_s: float) -> Iterator[None]:
        """The link's block connection for this thread alone; closed if it is lost."""
        if not link.block_lock.acquire(timeout=deadline_s):
            link.check()
            raise PeerLost(link.peer, "overdue")
        try:
            link.check()
            yield
        finally:
            if link.lost is not None and link.blocks is not None:
                link.blocks.close()
            link.block_lock.release()

    def _exchange(
        self, link: PeerLink, number: int, question: bytes, out_R: np.ndarray, until_s
    ) -> bool:
        """One question and its whole answer; else the connection is closed."""
        whole = False
        try:
            stream = link.blocks or self._connected(link, until_s)
            limit(stream, until_s)
            send(stream, question)
            self._traffic.add_sent(link.peer, Kind.BLOCK, len(question))
            start = receive(stream, LENGTH.size + wire.PREFIX.size, until_s)
            (size,) = LENGTH.unpack_from(start)
            frame = start[LENGTH.size :]
            kind, _, answered = wire.read_prefix(frame)
            left = size - len(frame)
            if kind == Kind.RECORD and answered == number:
                if left != out_R.size:
                    raise Refused(
                        link.peer,
                        f"its record has {left} bytes, expected {out_R.size}; give all "
                        "the same checkpoint",
                    )
                receive_into(stream, memoryview(out_R), until_s)
            elif 0 <= left <= wire.MAX_TEXT_BYTES:
                frame += receive(stream, left, until_s)
            else:
                raise wire.WireError(f"{kind.name} of {size} bytes as an answer")
            self._traffic.add_received(link.peer, kind, size)
            whole = kind != Kind.REFUSED
        finally:
            if not whole and link.blocks is not None:
                link.blocks.close()
                link.blocks = None
        if kind == Kind.ON_ERROR:
            raise Refused(link.peer, wire.decode_text(frame))
        if kind not in (Kind.RECORD, Kind.NOT_HERE) or answered != number:
            raise wire.WireError(unexpected(kind, frame))
        return kind == Kind.RECORD

    def _connected(self, link: PeerLink, until_s: float) -> ssl.SSLSocket:
        """A new connection of the link."""
        stream = self._context.wrap_socket(
            socket.socket(), do_handshake_on_connect=False
        )
        link.blocks = stream
        link.check()  # whoever loses a link hangs up what it finds there
        limit(stream, until_s)
        stream.connect((link.address.host, link.address.blocks))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit(stream, until_s)
        stream.do_handshake()
        return stream
