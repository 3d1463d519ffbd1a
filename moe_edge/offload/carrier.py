"""A link and its order: who waits for it, who goes first, what it came to.

Blocks go one after another, demands before prefetches, each in order, and a transfer
under way is never interrupted. Blocks that were asked for together and lie next to one
another in the store travel as one (`TransferLink.merges`): the link's latency passes
once. They stay requests of their own until then, so each may be taken back or become a
demand alone.

Who carries is a class each: `computed_carrier` in computed time; in real time
`real_carrier` (the caller), `thread_carrier` and `direct_carrier`.
"""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

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


class Carrier:
    """The order of one link; a subclass carries blocks and waits.

    Whoever looks (`poll`) begins what begins by now; whoever waits begins all that goes
    before it. Only `ThreadCarrier` does both in a thread instead.

    Attributes:
      link: what the blocks travel over.
      clock: tells the time in seconds.
      block_bytes: of a block, of the largest one where they differ.
      num_experts: E, blocks of a layer.
      totals: by cause: blocks, bytes and seconds on the link.
      merged: blocks that shared a neighbour's latency.
      wait_s: how long callers of `wait` stood still.

    Args:
      lock: guards what another thread changes; None: there is no other.
    """

    def __init__(
        self,
        link: TransferLink,
        block_bytes: int,
        num_experts: int,
        clock: Callable[[], float],
        lock=None,
    ):
        self.link, self.clock = link, clock
        self.block_bytes, self.num_experts = block_bytes, num_experts
        self._lock = contextlib.nullcontext() if lock is None else lock
        # In order of urgency.
        self._waiting: dict[str, deque[Transfer]] = {cause: deque() for cause in CAUSES}
        self.reset_stats()

    # What a subclass does.

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Returns when all blocks are in their slots: the seconds it took."""
        raise NotImplementedError

    def _begin(self, run: Sequence[Transfer]) -> None:
        """Carries blocks that travel as one."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Before the order changes: begins what travels by now, where nobody else does,
        so that it is neither overtaken nor taken back."""

    def num_bytes(self, layer: int, expert: int) -> int:
        """Of a block; all are equal, but where a subclass says otherwise."""
        return self.block_bytes

    def close(self) -> None:
        """Ends what runs in the background."""

    # The order.

    def ask(self, cause: str, transfers: Sequence[Transfer]) -> None:
        """Requests that were made together, as urgent as they are ordered."""
        with self._lock:
            self._waiting[cause].extend(
                _neighbours_together(transfers, self.num_experts)
            )

    def promote(self, transfer: Transfer) -> None:
        """A queued prefetch becomes the last demand."""
        self.catch_up()
        with self._lock:
            if transfer.state == "queued" and transfer.cause == "prefetch":
                self._waiting["prefetch"].remove(transfer)
                transfer.cause = "demand"
                self._waiting["demand"].append(transfer)

    def take_back(self, keeps: Callable[[int], bool]) -> list[Transfer]:
        """Cancels queued prefetches, but those that it keeps by key; which they are."""
        self.catch_up()
        with self._lock:
            waiting = self._waiting["prefetch"]
            cancelled = [transfer for transfer in waiting if not keeps(transfer.key)]
            for transfer in cancelled:
                transfer.state = "cancelled"
            self._waiting["prefetch"] = deque(
                transfer for transfer in waiting if transfer.state == "queued"
            )
        return cancelled

    def poll(self) -> None:
        """Does what is due, without waiting: begins all that begins before now."""
        while (waiting := self._next()) is not None:
            if max(self.link.free_s, waiting[0].requested_s) >= self.clock():
                return
            self._begin(self._take(waiting))

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """They are about to be waited for: begins with them and all before them."""
        for transfer in transfers:
            while transfer.state == "queued":
                self._begin(self._take(self._next()))

    def recover(self) -> None:
        """Forgets all requests, after an error; none is on its way afterwards."""
        self._forget()

    def _forget(self) -> None:
        for waiting in self._waiting.values():
            for transfer in waiting:
                transfer.state = "cancelled"
            waiting.clear()

    def _next(self) -> deque[Transfer] | None:
        """Those of the most urgent cause that wait."""
        for waiting in self._waiting.values():
            if waiting:
                return waiting
        return None

    def _take(
        self, waiting: deque[Transfer], limit: int | None = None, apart: bool = False
    ) -> list[Transfer]:
        """The next that waits and what travels with it: under way from now.

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

    # What it came to.

    def _carried(self, run: Sequence[Transfer], start_s: float, end_s: float) -> None:
        """Accounts for blocks that occupy the link from start to end, as one."""
        total, seconds = self.totals[run[0].cause], end_s - start_s
        num_bytes = sum([transfer.num_bytes for transfer in run])
        total.count += len(run)
        total.bytes += num_bytes
        total.seconds += seconds
        if len(run) > 1:
            self.merged += sum(_follows(b, a) for a, b in itertools.pairwise(run))
        for transfer in run:
            transfer.seconds = seconds * (transfer.num_bytes / num_bytes)
            transfer.arrival_s = end_s

    def reset_stats(self) -> None:
        """Counts from here on."""
        with self._lock:
            self.totals = {cause: Total() for cause in CAUSES}
        self.merged, self.wait_s = 0, 0.0


def refuse_cancelled(transfers: Iterable[Transfer]) -> None:
    """Raises RuntimeError if one of them will never arrive."""
    for transfer in transfers:
        if transfer.state == "cancelled":
            raise RuntimeError(
                f"layer {transfer.layer}, expert {transfer.expert}: waiting for a "
                "transfer that was cancelled"
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
