"""What the cluster's processes hand to a transport, and what they get from it.

A process has a number, its `peer` number. It asks others by a `Transport`
(`messages/transport.py`), and answers them by `Handlers`, in threads of the transport,
in order; these never call others, so that no two processes can wait for each other.
"""

import dataclasses
import socket
import threading
from typing import NamedTuple, Protocol

import numpy as np

from moe_edge.core.checks import MoeEdgeError

# Outages of Wi-Fi last seconds (a laptop changes its access point, a radio sleeps), and
# TCP, which waits twice as long before each attempt, needs about as long again.
HUNG_S = 10.0

LOSSES = {
    "dead": "closed the connection",
    "hung": "has not answered heartbeats",
    "overdue": "has not answered in time",
}


class PeerLost(MoeEdgeError):
    """A peer that cannot be waited for any longer.

    Attributes:
      peer: its number.
      kind: one of LOSSES.
    """

    def __init__(self, peer: int, kind: str, text: str | None = None):
        super().__init__(f"peer {peer} {text or LOSSES[kind]} ({kind})")
        self.peer = peer
        self.kind = kind


class SecretRefused(PeerLost):
    """A peer with which no handshake succeeds: its secret is another."""

    def __init__(self, peer: int, address: "Address"):
        where = f"{address.host}:{address.calls}"
        super().__init__(
            peer, "dead", f"at {where} refused the handshake; give all the same secret"
        )


class Refused(MoeEdgeError):
    """What a peer answered instead of a result: the error of its handler."""

    def __init__(self, peer: int, text: str):
        super().__init__(f"peer {peer}: {text}")
        self.peer = peer
        self.text = text


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a process listens."""

    host: str
    calls: int  # port of calls and control
    blocks: int  # port of blocks

    def refuses(self, within_s: float) -> bool:
        """Whether nobody listens here: the process that did has ended.

        Any other failure may be the network's, and says nothing about the process.
        """
        try:
            socket.create_connection((self.host, self.calls), within_s).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Tokens for the experts that another process holds.

    Attributes:
      layer, bucket: where, and the padded number of tokens to compute with.
      version: of the placement that the caller goes by.
      x_TD: float32, C-contiguous; T <= 65536.
      token_P: uint16, rows of x_TD, one a (token, block) pair.
      block_P: uint16, the blocks.
    """

    layer: int
    bucket: int
    version: int
    x_TD: np.ndarray
    token_P: np.ndarray
    block_P: np.ndarray


class Answered(NamedTuple):
    """What a call came back with.

    Attributes:
      rows: float32; None where the peer no longer holds a block.
      at_s: when they came, by `time.perf_counter`.
    """

    rows: np.ndarray | None
    at_s: float


class Handlers(Protocol):
    """What a process answers. Received arrays are read-only views.

    What a handler raises goes to the caller in one line (`Refused`).
    """

    def call(self, peer: int, call: Call) -> np.ndarray | None:
        """float32 rows, rank 2, C-contiguous; None: a block is not here."""

    def block(self, layer: int, block: int) -> np.ndarray | None:
        """The record, C-contiguous, unchanged until the fetch ends; None: not here.

        Asked once a fetch. Runs beside `call`, `control` and itself, in other threads.
        """

    def control(
        self, peer: int, name: str, fields: dict, arrays: dict[str, np.ndarray]
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """Fields and arrays of the answer; nobody reads that of a `post`."""

    def answered(self) -> None:
        """After an answer: work that it need not wait for. A handler may lack it."""


class Count(NamedTuple):
    """Messages and their bytes, our headers included."""

    messages: int = 0
    bytes: int = 0


class Traffic:
    """What has passed between a process and its peers, by peer and kind of message."""

    def __init__(self):
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Starts again from nothing."""
        with self._lock:
            self._sent: dict[tuple[int, int], Count] = {}
            self._received: dict[tuple[int, int], Count] = {}

    def add_sent(self, peer: int, kind: int, size_bytes: int) -> None:
        """Counts a message on its way out."""
        self._add(self._sent, (peer, kind), size_bytes)

    def add_received(self, peer: int, kind: int, size_bytes: int) -> None:
        """Counts a message that came in."""
        self._add(self._received, (peer, kind), size_bytes)

    def _add(self, counts: dict, key: tuple[int, int], size_bytes: int) -> None:
        with self._lock:
            messages, num_bytes = counts.get(key, (0, 0))
            counts[key] = Count(messages + 1, num_bytes + size_bytes)

    def sent(self) -> dict[tuple[int, int], Count]:
        """(peer, kind) -> messages and bytes handed to the transport."""
        with self._lock:
            return dict(self._sent)

    def received(self) -> dict[tuple[int, int], Count]:
        """(peer, kind) -> messages and bytes that came in."""
        with self._lock:
            return dict(self._received)
