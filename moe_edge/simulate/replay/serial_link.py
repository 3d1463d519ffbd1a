"""A queue of expert blocks in computed time instead of real time.

The discipline of `offload.transfer_queue.TransferQueue` over an `EmulatedLink`: one
block after another, demands before prefetches, nothing is interrupted.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable

from moe_edge.core.events import Total
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.transfer import CAUSES, TransferStats


@dataclasses.dataclass(eq=False)
class ComputedTransfer:
    """One block on its way; `done_s` is None until the link begins with it."""

    queue: "ComputedQueue" = dataclasses.field(repr=False)
    layer: int
    expert: int
    slot: int
    cause: str
    requested_s: float
    done_s: float | None = None

    @property
    def key(self) -> int:
        return self.layer * self.queue.num_experts + self.expert

    @property
    def done(self) -> bool:
        return self.done_s is not None and self.done_s <= self.queue.now_s


class ComputedQueue:
    """Carries one block after another; the caller moves `now_s` on and polls.

    Attributes:
      now_s: the present.
      transfer_s: how long a block occupies the link.
      begun: transfers by the cause with which they began.
      wasted: prefetched blocks that were overwritten before use.
      cancelled: prefetches taken back before they began.
    """

    def __init__(self, link: EmulatedLink, block_bytes: int, num_experts: int):
        self.block_bytes = block_bytes
        self.transfer_s = link.seconds(block_bytes)
        self.num_experts = num_experts
        self.now_s = self.free_s = 0.0
        self.begun = dict.fromkeys(CAUSES, 0)
        self.wasted = self.cancelled = 0
        self._queues: dict[str, deque[ComputedTransfer]] = {c: deque() for c in CAUSES}
        self._unused: dict[
            int, ComputedTransfer
        ] = {}  # prefetches by slot, until first used

    def request(
        self, layer: int, expert: int, slot: int, cause: str, step: int | None = None
    ) -> ComputedTransfer:
        """Queues a block."""
        transfer = ComputedTransfer(self, layer, expert, slot, cause, self.now_s)
        self.wasted += self._unused.pop(slot, None) is not None
        if cause == "prefetch":
            self._unused[slot] = transfer
        self._queues[cause].append(transfer)
        return transfer

    def poll(self) -> None:
        """Begins every transfer that begins before now."""
        while (waiting := self._next()) is not None:
            if max(self.free_s, waiting[0].requested_s) >= self.now_s:
                return
            self._begin(waiting)

    def wait(self, transfers: Iterable[ComputedTransfer]) -> float:
        """Moves on to when all are done: the seconds it took."""
        transfers, start_s = list(transfers), self.now_s
        while any(transfer.done_s is None for transfer in transfers):
            self._begin(self._next())
        self.now_s = max([start_s, *(transfer.done_s for transfer in transfers)])
        self.poll()
        return self.now_s - start_s

    def promote(self, transfer: ComputedTransfer) -> None:
        """A queued prefetch becomes the last demand."""
        if transfer.done_s is None and transfer.cause == "prefetch":
            self._queues["prefetch"].remove(transfer)
            transfer.cause = "demand"
            self._queues["demand"].append(transfer)

    def used(self, key: int) -> None:
        """A block was computed with: its prefetch was no waste."""
        for slot in [s for s, t in self._unused.items() if t.key == key]:
            del self._unused[slot]

    def cancel_prefetches(
        self, keep: Container[int] | Callable[[int], bool] = ()
    ) -> list[tuple[int, int, int]]:
        """Takes back queued prefetches: (layer, expert, slot) of each."""
        keeps = keep if callable(keep) else keep.__contains__
        queued = self._queues["prefetch"]
        gone = [t for t in queued if not keeps(t.key)]
        self._queues["prefetch"] = deque(t for t in queued if keeps(t.key))
        for transfer in gone:
            self._unused.pop(transfer.slot, None)
        self.cancelled += len(gone)
        return [(t.layer, t.expert, t.slot) for t in gone]

    def reset_stats(self) -> None:
        """Counts from here on."""
        self.begun = dict.fromkeys(CAUSES, 0)
        self.wasted = self.cancelled = 0
        self._unused.clear()

    def stats(self) -> TransferStats:
        """As `TransferQueue.stats`, of the transfers that have begun."""
        totals = {
            cause: Total(count, count * self.block_bytes, count * self.transfer_s)
            for cause, count in self.begun.items()
        }
        return TransferStats(
            **totals,
            wasted_bytes=self.wasted * self.block_bytes,
            unused_bytes=self.unused_blocks() * self.block_bytes,
            cancelled=self.cancelled,
            wait_s=0.0,  # the caller's clock knows
        )

    def unused_blocks(self) -> int:
        """Prefetched blocks whose transfer began and that nothing has used yet."""
        return sum(t.done_s is not None for t in self._unused.values())

    def _next(self) -> deque[ComputedTransfer] | None:
        return next((self._queues[c] for c in CAUSES if self._queues[c]), None)

    def _begin(self, waiting: deque[ComputedTransfer]) -> None:
        transfer = waiting.popleft()
        self.free_s = max(self.free_s, transfer.requested_s) + self.transfer_s
        transfer.done_s = self.free_s
        self.begun[transfer.cause] += 1
