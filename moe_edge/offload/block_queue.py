"""What every queue of expert blocks does: who waits, who goes first, what it came to.

Two queues carry: `transfer_queue.TransferQueue` in real time, `virtual_queue.
VirtualQueue` in computed time. Blocks go one after another, demands before prefetches,
each in order, and a transfer under way is never interrupted.
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable

from moe_edge.core.checks import check_known
from moe_edge.core.events import CAUSES, Total


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """One requested transfer, which only its queue changes; times are of its clock."""

    layer: int
    expert: int
    slot: int
    key: int  # layer * E + expert
    cause: str  # one of `core.events.CAUSES`
    step: int | None  # as the caller counts, for the event
    requested_s: float
    clock: Callable[[], float] = dataclasses.field(repr=False)  # real or computed
    state: str = "queued"  # then "running", "done" (copied) or "cancelled"
    seconds: float = 0.0  # on the link, once it is copied
    # When the link has delivered it: known once it is copied, and after the copy's end
    # on an emulated or a computed link.
    arrival_s: float = 0.0
    num_bytes: int = 0  # of the block

    @property
    def done(self) -> bool:
        """The slot holds the block and the link has delivered it."""
        return self.state == "done" and self.clock() >= self.arrival_s


@dataclasses.dataclass(frozen=True)
class TransferStats:
    """Sums since the queue was made, or its statistics were reset."""

    demand: Total  # transfers, bytes and seconds on the link
    prefetch: Total
    wasted_bytes: int  # prefetched blocks that were overwritten before any use
    unused_bytes: int  # prefetched blocks still waiting for their first use
    cancelled: int  # prefetches taken back before they began
    wait_s: float  # how long callers of `wait` (and of a serial `request`) stood still


class BlockQueue:
    """The queue's bookkeeping; a subclass carries blocks, waits and tells the time.

    Args:
      block_bytes: of a block, of the largest one where they differ.
      num_experts: E, blocks of a layer.
      clock: tells the time in seconds.
      lock: guards what another thread changes; None: there is no other.
    """

    def __init__(
        self, block_bytes: int, num_experts: int, clock: Callable[[], float], lock=None
    ):
        self.block_bytes, self.num_experts = block_bytes, num_experts
        self._clock = clock
        self._lock = contextlib.nullcontext() if lock is None else lock
        # In order of urgency.
        self._queues: dict[str, deque[Transfer]] = {cause: deque() for cause in CAUSES}
        self._in_slot: dict[int, Transfer] = {}  # the latest request of every slot
        self._unused: dict[int, Transfer] = {}  # prefetches by key until first used
        self.reset_stats()

    # What a subclass does.

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Returns when all blocks are in their slots: the seconds it took."""
        raise NotImplementedError

    def poll(self) -> None:
        """Does what is due by now, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs in the background."""

    def _check(self) -> None:
        """Refuses requests where there is a reason; the lock is held."""

    def _wake(self) -> None:
        """A request has come; the lock is held."""

    def _num_bytes(self, layer: int, expert: int) -> int:
        """Of a block; all are equal, but where a subclass says otherwise."""
        return self.block_bytes

    # What all share.

    def request(
        self, layer: int, expert: int, slot: int, cause: str, step: int | None = None
    ) -> Transfer:
        """Asks for a block in a slot.

        Args:
          layer, expert: the block; the model's layer index, a block of the layer.
          slot: its row; no program in flight may read it (`AliasedSlots`), and no
            queued request may aim at it.
          cause: one of `core.events.CAUSES`.
          step: stored with the event.
        Raises:
          RuntimeError: a queued request aims at the same slot.
        """
        check_known("transfer cause", cause, CAUSES)
        key = layer * self.num_experts + expert
        block, num_bytes = (layer, expert, slot, key), self._num_bytes(layer, expert)
        transfer = Transfer(
            *block, cause, step, self._clock(), self._clock, num_bytes=num_bytes
        )
        with self._lock:
            self._check()
            self._occupy(transfer)
            self._queues[cause].append(transfer)
            self._wake()
        return transfer

    def _occupy(self, transfer: Transfer) -> None:
        """Accounts for what the slot held before."""
        last = self._in_slot.get(transfer.slot)
        if last is not None:
            if last.state == "queued":
                raise RuntimeError(
                    f"slot {transfer.slot} awaits layer {last.layer}, expert "
                    f"{last.expert}; cancel that or wait for it first"
                )
            if self._unused.get(last.key) is last:
                del self._unused[last.key]
                self._wasted_bytes += last.num_bytes
        self._in_slot[transfer.slot] = transfer
        if transfer.cause == "prefetch":
            self._unused[transfer.key] = transfer

    def _next_queue(self) -> deque[Transfer] | None:
        """The most urgent queue that is not empty."""
        return next((queue for queue in self._queues.values() if queue), None)

    def promote(self, transfer: Transfer) -> None:
        """The block is needed now: a queued prefetch becomes the last demand."""
        with self._lock:
            if transfer.state == "queued" and transfer.cause == "prefetch":
                self._queues["prefetch"].remove(transfer)
                transfer.cause = "demand"
                self._queues["demand"].append(transfer)
        self.used(transfer.key)

    def used(self, key: int) -> None:
        """A block was computed with: its prefetch was no waste."""
        self._unused.pop(key, None)

    def cancel_prefetches(
        self, keep: Container[int] | Callable[[int], bool] = ()
    ) -> list[tuple[int, int, int]]:
        """Takes back queued prefetches, but those whose key is in `keep`.

        Args:
          keep: block keys, or a predicate of a key.
        Returns:
          (layer, expert, slot) of each; nothing was written there.
        """
        keeps = keep if callable(keep) else keep.__contains__
        with self._lock:
            queued = self._queues["prefetch"]
            cancelled = [transfer for transfer in queued if not keeps(transfer.key)]
            for transfer in cancelled:
                transfer.state = "cancelled"
            self._queues["prefetch"] = deque(t for t in queued if t.state == "queued")
        for transfer in cancelled:
            self._unused.pop(transfer.key, None)
        self._cancelled += len(cancelled)
        return [
            (transfer.layer, transfer.expert, transfer.slot) for transfer in cancelled
        ]

    def _carried(self, transfer: Transfer, start_s: float, end_s: float) -> None:
        """Accounts for a transfer that occupies the link from start to end."""
        total = self._totals[transfer.cause]
        total.count += 1
        total.bytes += transfer.num_bytes
        total.seconds += end_s - start_s
        transfer.seconds, transfer.arrival_s = end_s - start_s, end_s

    def recover(self) -> None:
        """Forgets all requests, after an error; none is on its way afterwards."""
        for queue in self._queues.values():
            queue.clear()
        self._in_slot.clear()
        self._unused.clear()

    def reset_stats(self) -> None:
        """Counts from here on; what was prefetched before is nobody's waste."""
        with self._lock:
            self._totals = {cause: Total() for cause in CAUSES}
        self._wasted_bytes = self._cancelled = 0
        self._wait_s = 0.0
        self._unused.clear()

    def stats(self) -> TransferStats:
        """Sums since the last `reset_stats`."""
        with self._lock:
            totals = {c: dataclasses.replace(t) for c, t in self._totals.items()}
        unused = [t.num_bytes for t in self._unused.values() if t.state == "done"]
        return TransferStats(
            demand=totals["demand"],
            prefetch=totals["prefetch"],
            wasted_bytes=self._wasted_bytes,
            unused_bytes=sum(unused),
            cancelled=self._cancelled,
            wait_s=self._wait_s,
        )
