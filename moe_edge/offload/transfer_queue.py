"""The one queue of expert blocks from the store to the device's slots."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable

from moe_edge.core.checks import check_known
from moe_edge.core.events import Recorder, Total
from moe_edge.offload.link import Link, wait_until
from moe_edge.offload.slots import Slots
from moe_edge.offload.store import HostStore
from moe_edge.offload.transfer import CAUSES, Transfer, TransferStats


class TransferQueue:
    """Moves blocks one after another: demands before prefetches, each in order.

    A transfer under way is never interrupted. All methods belong to one thread, the
    engine's. The background thread writes slots that allow it (`safe_in_thread`);
    for the others it brings blocks to the device, and `wait` and `poll` put them into
    their slots.

    With `asynchronous=False` a request is carried out before it returns: the serial
    reference, same bytes, no overlap.

    Use it as a context manager: the thread lives until `close`.
    """

    def __init__(
        self,
        store: HostStore,
        slots: Slots,
        link: Link | None = None,
        recorder: Recorder | None = None,
        asynchronous: bool = True,
    ):
        self.store = store
        self.slots = slots
        self.link = Link() if link is None else link
        self.recorder = Recorder(enabled=False) if recorder is None else recorder
        self.asynchronous = asynchronous
        # What the slots copy from: a record, or what the device reads by itself.
        self._source = store.record if slots.safe_in_thread else store.source
        self._queues: dict[str, deque[Transfer]] = {cause: deque() for cause in CAUSES}
        self._staged: list[tuple[Transfer, object]] = []
        self._in_slot: dict[int, Transfer] = {}  # the latest request of every slot
        self._unused: dict[int, Transfer] = {}  # prefetches by key until first used
        self._totals = {cause: Total() for cause in CAUSES}
        self._wasted_bytes = self._cancelled = 0
        self._wait_s = 0.0
        self._awaited: Transfer | None = None  # whose end wakes the engine
        self._error: BaseException | None = None
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # the thread waits for requests
        self._finished = threading.Condition(lock)  # the engine waits for blocks
        self._thread = None
        if asynchronous:
            self._thread = threading.Thread(
                target=self._run, name="moe_edge-queue", daemon=True
            )
            self._thread.start()

    def request(
        self, layer: int, expert: int, slot: int, cause: str, step: int | None = None
    ) -> Transfer:
        """Asks for a block in a slot.

        Args:
          layer, expert: the block; the model's layer index, a block of the layer.
          slot: its row; no program in flight may read it (`AliasedSlots`), and no
            queued request may aim at it.
          cause: "demand" or "prefetch".
          step: stored with the event.
        Raises:
          RuntimeError: a queued request aims at the same slot, or the queue is closed;
          whatever the thread died of.
        """
        check_known("transfer cause", cause, CAUSES)
        if not 0 <= slot < self.slots.num_slots:
            raise IndexError(f"slot {slot}; there are {self.slots.num_slots}")
        now_s = time.perf_counter()
        key = layer * self.store.num_experts + expert
        transfer = Transfer(layer, expert, slot, key, cause, step, now_s)
        with self._work:
            self._check()
            self._occupy(transfer)
            if self.asynchronous:
                self._queues[cause].append(transfer)
                self._work.notify()
        if not self.asynchronous:
            transfer.state = "running"
            source_R = self._source(layer, expert)
            self._carry(transfer, self.slots.write, slot, source_R)
            transfer.state = "done"
            wait_until(transfer.arrival_s)
            self._wait_s += time.perf_counter() - now_s
        return transfer

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Returns when all blocks are in their slots: the seconds it took.

        Raises:
          RuntimeError: a transfer was cancelled, or the queue is closed; whatever the
          thread died of.
        """
        transfers = list(transfers)
        start_s = time.perf_counter()
        while not all(transfer.state == "done" for transfer in transfers):
            for transfer in transfers:
                if transfer.state == "cancelled":
                    raise RuntimeError(
                        f"layer {transfer.layer}, expert {transfer.expert}: waiting "
                        "for a transfer that was cancelled"
                    )
            with self._finished:
                self._check()
                while not self._staged:
                    open_transfers = [t for t in transfers if t.state != "done"]
                    if not open_transfers:
                        break
                    self._awaited = open_transfers[-1]
                    self._finished.wait()
                    self._check()
            self._commit()
        if transfers:
            wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s = time.perf_counter() - start_s
        self._wait_s += waited_s
        return waited_s

    def poll(self) -> None:
        """Puts blocks that have arrived into their slots, without waiting.

        Raises: whatever the thread died of.
        """
        with self._finished:
            self._check()
        self._commit()

    def promote(self, transfer: Transfer) -> None:
        """The block is needed now: a queued prefetch becomes the last demand."""
        with self._work:
            if transfer.state == "queued" and transfer.cause == "prefetch":
                self._queues["prefetch"].remove(transfer)
                transfer.cause = "demand"
                self._queues["demand"].append(transfer)
        self.used(transfer)

    def used(self, block: Transfer | int) -> None:
        """A block (or its key) was computed with: its prefetch was no waste."""
        key = block.key if isinstance(block, Transfer) else block
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
        with self._work:
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

    def stats(self) -> TransferStats:
        with self._work:
            totals = {c: dataclasses.replace(t) for c, t in self._totals.items()}
        unused = sum(transfer.state == "done" for transfer in self._unused.values())
        return TransferStats(
            **totals,
            wasted_bytes=self._wasted_bytes,
            unused_bytes=unused * self.store.block_bytes,
            cancelled=self._cancelled,
            wait_s=self._wait_s,
        )

    def reset_stats(self) -> None:
        """Counts from here on; what was prefetched before is nobody's waste."""
        with self._work:
            self._totals = {cause: Total() for cause in CAUSES}
        self._wasted_bytes = self._cancelled = 0
        self._wait_s = 0.0
        self._unused.clear()

    def close(self) -> None:
        """Finishes the transfer under way, drops the others and ends the thread."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "TransferQueue":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the queue is closed")

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
                self._wasted_bytes += self.store.block_bytes
        self._in_slot[transfer.slot] = transfer
        if transfer.cause == "prefetch":
            self._unused[transfer.key] = transfer

    def _commit(self) -> None:
        """The engine thread's part of writing `DonatedSlots`."""
        with self._finished:
            staged, self._staged = self._staged, []
            if staged:
                self._work.notify()  # there is room again
        for transfer, block in staged:
            self.slots.commit(transfer.slot, block)
            transfer.state = "done"

    def _carry(self, transfer: Transfer, copy: Callable, *args):
        """One transfer over the link, accounted for."""
        num_bytes = self.store.block_bytes
        start_s, end_s, result = self.link.transfer(
            num_bytes, transfer.requested_s, copy, *args
        )
        total = self._totals[transfer.cause]
        total.count += 1
        total.bytes += num_bytes
        total.seconds += end_s - start_s
        transfer.seconds, transfer.arrival_s = end_s - start_s, end_s
        recorder = self.recorder
        if recorder.enabled:
            expert, sub = divmod(transfer.expert, self.store.subs)
            recorder.add(
                "transfer",
                recorder.clock.at(start_s),
                end_s - start_s,
                transfer.cause,
                step=transfer.step,
                layer=transfer.layer,
                expert=expert,
                sub=sub,
                bytes=num_bytes,
            )
        return result

    def _run(self) -> None:
        """The background thread."""
        try:
            while (transfer := self._next()) is not None:
                source_R = self._source(transfer.layer, transfer.expert)
                if self.slots.safe_in_thread:
                    self._carry(transfer, self.slots.write, transfer.slot, source_R)
                    with self._finished:
                        transfer.state = "done"
                        if transfer is self._awaited:
                            self._finished.notify()
                else:
                    block = self._carry(transfer, self.slots.stage, source_R)
                    with self._finished:
                        self._staged.append((transfer, block))
                        self._finished.notify()
        except BaseException as error:  # handed to the engine, which raises it
            with self._finished:
                self._error = error
                self._finished.notify()

    def _next(self) -> Transfer | None:
        """The next transfer, now running; None when the queue closes."""
        self.link.rest()  # chosen late, so that a demand may still overtake
        with self._work:
            while not self._closed:
                waiting = self._queues["demand"] or self._queues["prefetch"]
                if waiting and len(self._staged) < self.slots.max_staged:
                    transfer = waiting.popleft()
                    transfer.state = "running"
                    return transfer
                self._work.wait()
        return None
