"""What every queue of expert blocks does: who waits, who goes first, what it came to.

Three queues carry: `transfer_queue.TransferQueue` by a thread, `carried_queue.
CarriedQueue` by whoever asks, both in real time, and `virtual_queue.VirtualQueue` in
computed time. Blocks go one after another, demands before prefetches, each in order,
and a transfer under way is never interrupted.

Blocks that were asked for together and lie next to one another in the store travel as
one (`TransferLink.merges`): the link's latency passes once. They stay requests of
their own until then, so each may be taken back or become a demand alone.
"""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from moe_edge.core.checks import check_known
from moe_edge.core.events import CAUSES, Total
from moe_edge.offload.link import TransferLink


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
    seconds: float = 0.0  # on the link, its share of a common transfer; once copied
    # When the link has delivered it: known once it is copied, and after the copy's end
    # on an emulated or a computed link.
    arrival_s: float = 0.0
    num_bytes: int = 0  # of the block
    batch: int = 0  # requests of one number were made together

    @property
    def done(self) -> bool:
        """The slot holds the block and the link has delivered it."""
        return self.state == "done" and self.clock() >= self.arrival_s


@dataclasses.dataclass(frozen=True)
class TransferStats:
    """Sums since the queue was made, or its statistics were reset."""

    demand: Total  # blocks, bytes and seconds on the link
    prefetch: Total
    wasted_bytes: int  # prefetched blocks that were overwritten before any use
    unused_bytes: int  # prefetched blocks still waiting for their first use
    cancelled: int  # prefetches taken back before they began
    merged: int  # blocks that shared a neighbour's latency
    wait_s: float  # how long callers of `wait` (and of a serial `request`) stood still


class BlockQueue:
    """The queue's bookkeeping; a subclass carries blocks, waits and tells the time.

    Attributes:
      link: what the blocks travel over.

    Args:
      block_bytes: of a block, of the largest one where they differ.
      num_experts: E, blocks of a layer.
      clock: tells the time in seconds.
      lock: guards what another thread changes; None: there is no other.
    """

    link: TransferLink

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
        self._batches = 0  # so far
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

    def _catch_up(self) -> None:
        """Before the order changes: begins what travels by now, where nobody else does,
        so that it is neither overtaken nor taken back."""

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
        """Asks for a block in a slot; see `request_all`."""
        return self.request_all([(layer, expert, slot)], cause, step)[0]

    def request_all(
        self,
        blocks: Sequence[tuple[int, int, int]],
        cause: str,
        step: int | None = None,
    ) -> list[Transfer]:
        """Asks for blocks, in order of urgency; neighbours among them travel as one.

        Args:
          blocks: (layer, expert, slot): the model's layer index, a block of the layer,
            and its row; no program in flight may read it (`AliasedSlots`), and no
            queued request may aim at it.
          cause: one of `core.events.CAUSES`.
          step: stored with the event.
        Returns:
          a transfer of each, as `blocks` are ordered.
        Raises:
          RuntimeError: a queued request aims at the same slot.
        """
        if cause not in CAUSES:
            check_known("transfer cause", cause, CAUSES)
        self._catch_up()
        now_s, clock, E = self._clock(), self._clock, self.num_experts
        self._batches += 1
        transfers = [
            Transfer(
                *(layer, expert, slot, layer * E + expert, cause, step, now_s, clock),
                batch=self._batches,
                num_bytes=self._num_bytes(layer, expert),
            )
            for layer, expert, slot in blocks
        ]
        with self._lock:
            self._check()
            for transfer in transfers:
                self._refuse_queued(transfer.slot)
            for transfer in transfers:
                self._occupy(transfer)
            self._enqueue(cause, transfers)
        return transfers

    def _enqueue(self, cause: str, transfers: Sequence[Transfer]) -> None:
        """Requests wait for the link; the lock is held."""
        self._queues[cause].extend(_neighbours_together(transfers, self.num_experts))
        self._wake()

    def _refuse_queued(self, slot: int) -> None:
        last = self._in_slot.get(slot)
        if last is not None and last.state == "queued":
            raise RuntimeError(
                f"slot {slot} awaits layer {last.layer}, expert {last.expert}; cancel "
                "that or wait for it first"
            )

    def _occupy(self, transfer: Transfer) -> None:
        """Accounts for what the slot held before."""
        last = self._in_slot.get(transfer.slot)
        if last is not None and self._unused.get(last.key) is last:
            del self._unused[last.key]
            self._wasted_bytes += last.num_bytes
        self._in_slot[transfer.slot] = transfer
        if transfer.cause == "prefetch":
            self._unused[transfer.key] = transfer

    def _next_queue(self) -> deque[Transfer] | None:
        """The most urgent queue that is not empty."""
        return next((queue for queue in self._queues.values() if queue), None)

    def _take(
        self, waiting: deque[Transfer], limit: int | None = None, apart: bool = False
    ) -> list[Transfer]:
        """The next transfer of a queue and what travels with it: under way from now.

        Args:
          limit: of blocks; None: none.
          apart: whether also blocks that are no neighbours travel with it.
        """
        run = [waiting.popleft()]
        if self.link.merges:
            while waiting and len(run) != limit:
                if not apart and not _follows(waiting[0], run[-1]):
                    break
                run.append(waiting.popleft())
        for transfer in run:
            transfer.state = "running"
        return run

    def promote(self, transfer: Transfer) -> None:
        """The block is needed now: a queued prefetch becomes the last demand."""
        self._catch_up()
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
        self._catch_up()
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

    def _carried(self, run: Sequence[Transfer], start_s: float, end_s: float) -> None:
        """Accounts for blocks that occupy the link from start to end, as one."""
        total, seconds = self._totals[run[0].cause], end_s - start_s
        num_bytes = sum(transfer.num_bytes for transfer in run)
        total.count += len(run)
        total.bytes += num_bytes
        total.seconds += seconds
        self._merged += sum(_follows(b, a) for a, b in itertools.pairwise(run))
        for transfer in run:
            transfer.seconds = seconds * (transfer.num_bytes / num_bytes)
            transfer.arrival_s = end_s

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
        self._wasted_bytes = self._cancelled = self._merged = 0
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
            merged=self._merged,
            wait_s=self._wait_s,
        )


def _follows(transfer: Transfer, other: Transfer) -> bool:
    """Whether it was asked for together with the other, its neighbour in the store."""
    return (
        transfer.batch == other.batch
        and transfer.layer == other.layer
        and transfer.expert == other.expert + 1
    )


def _neighbours_together(
    transfers: Sequence[Transfer], num_experts: int
) -> Sequence[Transfer]:
    """In order, but a group of neighbours goes where its most urgent one does."""
    if len(transfers) == 1:
        return transfers
    left = {transfer.key: transfer for transfer in transfers}
    ordered = []
    for key in list(left):
        if key not in left:
            continue
        while key % num_experts and key - 1 in left:
            key -= 1
        ordered.append(left.pop(key))
        while (key + 1) % num_experts and key + 1 in left:
            key += 1
            ordered.append(left.pop(key))
    return ordered
