"""The queues of several homes as one: each home has its own queue and link.

A request goes to the queue of the home whose slot it names, so demands of one home do
not wait for another's. What is waited for is begun on all links first.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.core.events import Total
from moe_edge.offload.block_queue import BlockQueue, Transfer, TransferStats
from moe_edge.offload.link import TransferLink

if TYPE_CHECKING:
    from moe_edge.offload.home_slots import HomeSlots
    from moe_edge.offload.transfer_queue import TransferQueue


class HomeQueues:
    """What engine and residency ask of a `BlockQueue`, for several of them.

    Args:
      queues: of the homes, in their order; all over one store.
      slots: of all homes.
      home_S: the home of each slot.
    """

    def __init__(
        self, queues: Sequence["TransferQueue"], slots: "HomeSlots", home_S: np.ndarray
    ):
        self.queues, self.slots = tuple(queues), slots
        self.store, self.block_bytes = queues[0].store, queues[0].block_bytes
        self._home_S = home_S.tolist()

    @property
    def link(self) -> TransferLink:
        """The first home's; all are alike."""
        return self.queues[0].link

    def home_of(self, transfer: Transfer) -> int:
        """Over whose link a transfer goes."""
        return self._home_S[transfer.slot]

    def _by_home(self, transfers: Iterable[Transfer]) -> dict[int, list[Transfer]]:
        parts: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            parts.setdefault(self.home_of(transfer), []).append(transfer)
        return parts

    def request_all(
        self,
        blocks: Sequence[tuple[int, int, int]],
        cause: str,
        step: int | None = None,
    ) -> list[Transfer]:
        """As `BlockQueue.request_all`."""
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for block in blocks:
            parts.setdefault(self._home_S[block[2]], []).append(block)
        asked: dict[int, Transfer] = {}
        for home, part in parts.items():
            found = self.queues[home].request_all(part, cause, step)
            asked |= {transfer.slot: transfer for transfer in found}
        return [asked[slot] for *_, slot in blocks]

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """As `BlockQueue.wait`."""
        parts = self._by_home(transfers)
        for home, part in parts.items():
            self.queues[home].begin(part)
        return sum(self.queues[home].wait(part) for home, part in parts.items())

    def poll(self) -> None:
        """As `BlockQueue.poll`."""
        for queue in self.queues:
            queue.poll()

    def promote(self, transfer: Transfer) -> None:
        """As `BlockQueue.promote`."""
        self.queues[self.home_of(transfer)].promote(transfer)

    def used(self, key: int) -> None:
        """As `BlockQueue.used`."""
        for queue in self.queues:
            queue.used(key)

    def cancel_prefetches(self, keep=()) -> list[tuple[int, int, int]]:
        """As `BlockQueue.cancel_prefetches`."""
        return [
            block for queue in self.queues for block in queue.cancel_prefetches(keep)
        ]

    def close(self) -> None:
        """As `BlockQueue.close`."""
        for queue in self.queues:
            queue.close()

    def recover(self) -> None:
        """As `BlockQueue.recover`."""
        for queue in self.queues:
            queue.recover()

    def reset_stats(self) -> None:
        """As `BlockQueue.reset_stats`."""
        for queue in self.queues:
            queue.reset_stats()

    def stats(self) -> TransferStats:
        """The sums over all homes."""
        return sum_stats([queue.stats() for queue in self.queues])

    def report(self) -> list[dict]:
        """What came to each home, ready for JSON."""
        return [
            {"bytes": each.demand.bytes + each.prefetch.bytes, "wait_s": each.wait_s}
            for each in (queue.stats() for queue in self.queues)
        ]


def sum_stats(parts: Sequence[TransferStats]) -> TransferStats:
    """Statistics of several queues that one thread waits for, one after another."""

    def summed(values):
        first = values[0]
        if isinstance(first, Total):
            columns = zip(*map(dataclasses.astuple, values), strict=True)
            return Total(*map(sum, columns))
        return sum(values)

    names = [field.name for field in dataclasses.fields(TransferStats)]
    return TransferStats(**{n: summed([getattr(p, n) for p in parts]) for n in names})


Queues = BlockQueue | HomeQueues
