"""The thread that brings blocks into free slots, beside all that a server computes."""

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from moe_edge.cluster.node.holdings import Holdings
from moe_edge.cluster.roles import FIRST
from moe_edge.cluster.transport.base import PeerLost, Refused
from moe_edge.cluster.transport.messages.transport import Transport

FETCH_S = 30.0  # for a block of another server


class BlockLoader(threading.Thread):
    """Brings blocks, order after order, from the checkpoint or another server.

    Args:
      transport: to other servers; what one does not give is read from the own
        checkpoint.
      done: is told (order, what it has read itself) after each.
      failed: is told what this thread dies of.
    """

    def __init__(
        self,
        holdings: Holdings,
        transport: Transport,
        done: Callable[[int, list[tuple[int, int]]], None],
        failed: Callable[[BaseException], None],
    ):
        super().__init__(name="moe_edge-bring", daemon=True)
        self._holdings, self._transport = holdings, transport
        self._done, self._failed = done, failed
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        self._brought: list[tuple] = []
        self._writing = threading.Lock()
        self._epoch = 0  # orders of earlier ones are forgotten

    def bring(self, order: int, cells_X3: np.ndarray) -> None:
        """Orders blocks: layer, block and the server that sends it, or -1."""
        self._orders.put((self._epoch, order, cells_X3.tolist()))

    def stop(self) -> None:
        """Ends the thread after what was ordered."""
        self._orders.put(None)

    @property
    def brought(self) -> np.ndarray:
        """float64 [X, 5]: began_s, seconds, layer, block, source of each."""
        return np.array(self._brought, np.float64).reshape(-1, 5)

    def clear(self) -> None:
        """Forgets what was brought."""
        self._brought.clear()

    def forget(self) -> None:
        """Forgets all orders: nothing comes any more of those that there are."""
        with self._writing:
            self._epoch += 1

    def run(self) -> None:
        try:
            while (ordered := self._orders.get()) is not None:
                epoch, order, cells = ordered
                sources = [self._one(epoch, *cell) for cell in cells]
                if epoch != self._epoch:
                    continue
                both = zip(cells, sources, strict=True)
                self._done(order, [cell[:2] for cell, source in both if source < 0])
        except BaseException as error:  # the main thread ends by it
            self._failed(error)

    def _one(self, epoch: int, layer: int, block: int, source: int) -> int:
        """Brings a block; where it came from in the end."""
        if epoch != self._epoch:
            return source
        started_s, blocks = time.perf_counter(), self._holdings.blocks
        if source >= 0:
            record_R = np.empty(blocks.record_size, blocks.dtype)
            if not self._has_come(source, layer, block, record_R):
                source = -1
        if source < 0:
            record_R = blocks.read(layer, block)
        with self._writing:
            if epoch != self._epoch:
                return source
            self._holdings.put(layer, block, record_R)
        seconds = time.perf_counter() - started_s
        self._brought.append((started_s, seconds, layer, block, source))
        return source

    def _has_come(self, source: int, layer: int, block: int, out_R) -> bool:
        try:
            return self._transport.fetch(FIRST + source, layer, block, out_R, FETCH_S)
        except (PeerLost, Refused):
            return False
