"""Pulls a block from a peer by pieces, a few asked for ahead.

Whoever wants the block asks for each piece, so what queues on a link before a call is
never more than those few pieces.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from moe_edge.cluster.transport import wire
from moe_edge.cluster.transport.base import PeerLost, Refused, Traffic
from moe_edge.cluster.transport.messages.link import Link, malformed, unexpected
from moe_edge.cluster.transport.messages.sockets import Sockets
from moe_edge.cluster.transport.wire import BlockRequest, Kind
from moe_edge.core.checks import ConfigError


class Fetcher:
    """Fetches blocks over the block sockets of links, one at a time from each peer.

    Args:
      sockets: makes the block socket of a link, at its first fetch.
      lose: gives a link up.
      chunk_bytes, window: size of a piece, and how many are asked for ahead.
    """

    def __init__(
        self,
        sockets: Sockets,
        lose: Callable[[Link, Callable[[], PeerLost]], None],
        traffic: Traffic,
        chunk_bytes: int,
        window: int,
    ):
        self._sockets = sockets
        self._lose = lose
        self._traffic = traffic
        self._chunk_bytes = chunk_bytes
        self._window = window

    def fetch(
        self,
        link: Link,
        number: int,
        layer: int,
        block: int,
        out: np.ndarray,
        deadline_s: float,
    ) -> bool:
        """As `Transport.fetch`; `number` is this fetch's own."""
        if not out.flags.c_contiguous:
            raise ConfigError(
                f"out is {out.dtype}{list(out.shape)} with gaps, expected C-contiguous"
            )
        until_s = time.monotonic() + deadline_s
        out_R = out.reshape(-1).view(np.uint8)
        pieces = -(-out_R.size // self._chunk_bytes)
        with self._held(link, deadline_s):
            asked = 0
            for piece in range(pieces):
                while asked < min(piece + self._window, pieces):
                    at = asked * self._chunk_bytes
                    size = min(self._chunk_bytes, out_R.size - at)
                    self._ask(link, number, BlockRequest(layer, block, at, size))
                    asked += 1
                at = piece * self._chunk_bytes
                data = self._piece(link, number, at, out_R.size, until_s)
                if data is None:
                    return False
                out_R[at : at + data.size] = data
        return True

    @contextlib.contextmanager
    def _held(self, link: Link, deadline_s: float) -> Iterator[None]:
        """The link's block socket for this thread alone; closed if it is lost."""
        if not link.block_lock.acquire(timeout=deadline_s):
            link.check()
            raise PeerLost(link.peer, "overdue")
        try:
            link.check()
            if link.blocks is None:
                link.blocks = self._sockets.dealer(b"b")
                link.blocks.connect(f"tcp://{link.address.host}:{link.address.blocks}")
            yield
        finally:
            if link.lost is not None and link.blocks is not None:
                link.blocks.close()
            link.block_lock.release()

    def _ask(self, link: Link, number: int, request: BlockRequest) -> None:
        frame = wire.encode_block(number, request)
        link.blocks.send(frame, zmq.NOBLOCK)
        self._traffic.add_sent(link.peer, Kind.BLOCK, len(frame))

    def _piece(
        self, link: Link, number: int, at: int, total: int, until_s: float
    ) -> np.ndarray | None:
        """The next piece, which is to begin at `at`; None: not here."""
        while True:
            try:
                frame = link.blocks.recv()
            except zmq.Again:
                link.check()
                if time.monotonic() > until_s:
                    raise PeerLost(link.peer, "overdue") from None
                continue
            try:
                kind, _, answered = wire.read_prefix(frame)
                self._traffic.add_received(link.peer, kind, len(frame))
                if kind != Kind.REFUSED and answered != number:
                    continue  # of a fetch that was given up
                if kind == Kind.NOT_HERE:
                    return None
                if kind == Kind.ON_ERROR:
                    raise Refused(link.peer, wire.decode_text(frame))
                if kind != Kind.CHUNK:
                    raise wire.WireError(unexpected(kind, frame))
                record_bytes, offset, data = wire.decode_chunk(frame)
                wanted = min(self._chunk_bytes, total - at)
                if record_bytes == total and (offset, data.size) != (at, wanted):
                    raise wire.WireError(
                        f"CHUNK of {data.size} bytes at {offset}, expected {wanted} "
                        f"at {at}"
                    )
            except wire.WireError as error:
                self._lose(link, malformed(link.peer, error))
                link.check()
                raise
            if record_bytes != total:
                raise Refused(
                    link.peer,
                    f"its record has {record_bytes} bytes, expected {total}; give all "
                    "the same checkpoint",
                )
            return data
