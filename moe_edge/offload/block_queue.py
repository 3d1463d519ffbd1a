"""The queue of expert blocks: what was asked for, and what lies in which slot.

One for real and computed time: a `Carrier` a link keeps the order and brings the
blocks. There is one link, or one a home (`homes`): a request goes to the carrier of the
home whose slot it names, so demands of one home do not wait for another's.
"""

import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Sequence

import numpy as np

from moe_edge.core.checks import check_known
from moe_edge.core.events import CAUSES, Total
from moe_edge.offload.carrier import Carrier, Transfer
from moe_edge.offload.link import TransferLink


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
    """All methods belong to one thread, the engine's.

    Args:
      carriers: of the homes, in their order; all alike and over one store.
      num_slots: S, that requests may name; None: any.
      home_S: the home of each slot, of several homes.
    """

    def __init__(
        self,
        carriers: Sequence[Carrier],
        num_slots: int | None = None,
        home_S: np.ndarray | None = None,
    ):
        self.carriers = tuple(carriers)
        self.block_bytes = carriers[0].block_bytes
        self._num_slots = num_slots
        self._home_S = None if home_S is None else home_S.tolist()
        self._in_slot: dict[int, Transfer] = {}  # the latest request of every slot
        self._unused: dict[int, Transfer] = {}  # prefetches by key until first used
        self._batches = 0  # so far
        self.reset_stats()

    @property
    def link(self) -> TransferLink:
        """The first home's; all are alike."""
        return self.carriers[0].link

    def carrier_of(self, transfer: Transfer) -> Carrier:
        """Over whose link it goes."""
        home_S = self._home_S
        return self.carriers[0 if home_S is None else home_S[transfer.slot]]

    def _by_carrier(
        self, transfers: Sequence[Transfer]
    ) -> Collection[tuple[Carrier, Sequence[Transfer]]]:
        if self._home_S is None:
            return ((self.carriers[0], transfers),) if transfers else ()
        parts: dict[Carrier, list[Transfer]] = {}
        for transfer in transfers:
            parts.setdefault(self.carrier_of(transfer), []).append(transfer)
        return parts.items()

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
          IndexError: no such slot.
          RuntimeError: a queued request aims at the same slot, or the queue is closed;
          whatever a copy raised, now or before: what it did not reach is cancelled.
        """
        if cause not in CAUSES:
            check_known("transfer cause", cause, CAUSES)
        for carrier in self.carriers:
            carrier.catch_up()
        first = self.carriers[0]
        now_s, E = first.clock(), first.num_experts
        self._batches += 1
        transfers = [
            Transfer(
                *(layer, expert, slot, layer * E + expert, cause, step),
                *(now_s, first.clock),
                batch=self._batches,
                num_bytes=first.num_bytes(layer, expert),
            )
            for layer, expert, slot in blocks
        ]
        for transfer in transfers:
            self._check_slot(transfer.slot)
        for transfer in transfers:
            self._occupy(transfer)
        try:
            for carrier, part in self._by_carrier(transfers):
                carrier.ask(cause, part)
        except BaseException:
            for transfer in transfers:  # such as of a home that comes after it
                if transfer.state == "queued":
                    transfer.state = "cancelled"
            raise
        return transfers

    def _check_slot(self, slot: int) -> None:
        if self._num_slots is not None and not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot}; there are {self._num_slots}")
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

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Returns when all blocks are in their slots: the seconds it took.

        What is waited for is begun on all links first.

        Raises:
          RuntimeError: a transfer was cancelled, or the queue is closed; what a copy
          raised.
        """
        if self._home_S is None:
            return self.carriers[0].wait(list(transfers))
        parts = self._by_carrier(list(transfers))
        for carrier, part in parts:
            carrier.begin(part)
        return sum(carrier.wait(part) for carrier, part in parts)

    def poll(self) -> None:
        """Does what is due by now, without waiting.

        Raises: what a copy raised.
        """
        for carrier in self.carriers:
            carrier.poll()

    def promote(self, transfer: Transfer) -> None:
        """The block is needed now: a queued prefetch becomes the last demand."""
        self.carrier_of(transfer).promote(transfer)
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
        cancelled = [t for each in self.carriers for t in each.take_back(keeps)]
        for transfer in cancelled:
            self._unused.pop(transfer.key, None)
        self._cancelled += len(cancelled)
        return [
            (transfer.layer, transfer.expert, transfer.slot) for transfer in cancelled
        ]

    def close(self) -> None:
        """Finishes transfers under way, drops the others and ends threads."""
        for carrier in self.carriers:
            carrier.close()

    def recover(self) -> None:
        """Forgets all requests, after an error; none is on its way afterwards."""
        for carrier in self.carriers:
            carrier.recover()
        self._in_slot.clear()
        self._unused.clear()

    def reset_stats(self) -> None:
        """Counts from here on; what was prefetched before is nobody's waste."""
        for carrier in self.carriers:
            carrier.reset_stats()
        self._wasted_bytes = self._cancelled = 0
        self._unused.clear()

    def stats(self) -> TransferStats:
        """Sums over all links since the last `reset_stats`."""
        unused = [t.num_bytes for t in self._unused.values() if t.state == "done"]
        return TransferStats(
            demand=self._total("demand"),
            prefetch=self._total("prefetch"),
            wasted_bytes=self._wasted_bytes,
            unused_bytes=sum(unused),
            cancelled=self._cancelled,
            merged=sum(carrier.merged for carrier in self.carriers),
            wait_s=sum(carrier.wait_s for carrier in self.carriers),
        )

    def _total(self, cause: str) -> Total:
        total = Total()
        for each in (carrier.totals[cause] for carrier in self.carriers):
            total.count += each.count
            total.bytes += each.bytes
            total.seconds += each.seconds
        return total

    def report(self) -> list[dict]:
        """What came over each link, ready for JSON."""
        return [
            {
                "bytes": sum(total.bytes for total in carrier.totals.values()),
                "wait_s": carrier.wait_s,
            }
            for carrier in self.carriers
        ]
