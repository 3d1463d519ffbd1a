"""The queue of expert blocks from the store to the device's slots, in real time."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from moe_edge.core.events import Recorder
from moe_edge.offload.block_queue import BlockQueue, Transfer
from moe_edge.offload.link import TransferLink, wait_until
from moe_edge.offload.slots import Slots


class Blocks(Protocol):
    """What is moved: a `HostStore`, or another owner of records of any size."""

    num_experts: int
    subs: int
    block_bytes: int

    def num_bytes(self, layer: int, expert: int) -> int: ...

    def record(self, layer: int, expert: int) -> Any: ...

    def source(self, layer: int, expert: int) -> Any: ...


class TransferQueue(BlockQueue):
    """Moves blocks into slots by a thread of its own: from a disk, from pinned memory.

    All methods belong to one thread, the engine's. The background thread writes slots
    that allow it (`safe_in_thread`); for the others it brings blocks to the device, and
    `wait` and `poll` put them into their slots.

    With `asynchronous=False` a request is carried out before it returns: the serial
    reference, same bytes, no overlap.

    Use it as a context manager: the thread lives until `close`.
    """

    def __init__(
        self,
        store: Blocks,
        slots: Slots,
        link: TransferLink | None = None,
        recorder: Recorder | None = None,
        asynchronous: bool = True,
    ):
        self.store = store
        self.slots = slots
        self.link = TransferLink() if link is None else link
        self.recorder = Recorder(enabled=False) if recorder is None else recorder
        self.asynchronous = asynchronous
        # What the slots copy from: a record, or what the device reads by itself.
        self._source = store.record if slots.safe_in_thread else store.source
        self._staged: list[tuple[Transfer, object]] = []
        self._awaited: list[Transfer] = []  # the end of all of them wakes the engine
        self._error: BaseException | None = None
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # the thread waits for requests
        self._finished = threading.Condition(lock)  # the engine waits for blocks
        super().__init__(store.block_bytes, store.num_experts, time.perf_counter, lock)
        self._thread = None
        self._start()

    def _start(self) -> None:
        if self.asynchronous:
            self._thread = threading.Thread(
                target=self._run, name="moe_edge-queue", daemon=True
            )
            self._thread.start()

    def request_all(
        self,
        blocks: Sequence[tuple[int, int, int]],
        cause: str,
        step: int | None = None,
    ) -> list[Transfer]:
        """As `BlockQueue.request_all`.

        Raises:
          IndexError: no such slot.
          RuntimeError: a queued request aims at the same slot, or the queue is closed;
          whatever the thread died of.
        """
        for _, _, slot in blocks:
            if not 0 <= slot < self.slots.num_slots:
                raise IndexError(f"slot {slot}; there are {self.slots.num_slots}")
        transfers = super().request_all(blocks, cause, step)
        if transfers and not self.asynchronous:
            self._carry_now(transfers)
        return transfers

    def _carry_now(self, transfers: Sequence[Transfer]) -> None:
        """The serial reference: carries what was just asked for, and waits for it."""
        waiting = self._queues[transfers[0].cause]
        try:
            while waiting:
                self._carry_next(waiting)
        finally:
            for transfer in waiting:  # of an error: nobody will carry them
                transfer.state = "cancelled"
            waiting.clear()
        wait_until(max(transfer.arrival_s for transfer in transfers))
        self._wait_s += time.perf_counter() - transfers[0].requested_s

    def _carry_next(self, waiting: deque[Transfer]) -> None:
        """Carries the next blocks of a queue in the calling thread."""
        run = self._take(waiting)
        sources = [self._source(t.layer, t.expert) for t in run]
        self._carry(run, self._write, run, sources)
        for transfer in run:
            transfer.state = "done"

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """They are about to be waited for; the thread has begun with them."""

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Returns when all blocks are in their slots: the seconds it took.

        Raises:
          RuntimeError: a transfer was cancelled, or the queue is closed; whatever the
          thread died of.
        """
        transfers = list(transfers)
        start_s = time.perf_counter()
        while not all(transfer.state == "done" for transfer in transfers):
            refuse_cancelled(transfers)
            with self._finished:
                self._check()
                while not self._staged or self._is_partial(transfers):
                    open_transfers = [t for t in transfers if t.state != "done"]
                    if not open_transfers:
                        break
                    self._awaited = open_transfers
                    self._finished.wait()
                    self._check()
            self._commit()
        if transfers:
            wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s = time.perf_counter() - start_s
        self._wait_s += waited_s
        return waited_s

    def _is_partial(self, transfers: Sequence[Transfer]) -> bool:
        """Whether more of them should arrive before blocks go into their slots."""
        if not self.slots.gathers or len(self._staged) >= self.slots.max_staged:
            return False
        staged = {id(transfer) for transfer, _ in self._staged}
        return any(t.state != "done" and id(t) not in staged for t in transfers)

    def poll(self) -> None:
        """Puts blocks that have arrived into their slots, without waiting.

        Raises: whatever the thread died of.
        """
        with self._finished:
            self._check()
        self._commit()

    def close(self) -> None:
        """Finishes the transfer under way, drops the others and ends the thread."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def recover(self) -> None:
        """As `BlockQueue.recover`; a thread that died of the error has a successor."""
        self.close()
        super().recover()
        self._staged, self._awaited = [], []
        self._error, self._closed = None, False
        self.slots.recover()
        self._start()

    def __enter__(self) -> "TransferQueue":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the queue is closed")

    def _wake(self) -> None:
        self._work.notify()

    def _num_bytes(self, layer: int, expert: int) -> int:
        return self.store.num_bytes(layer, expert)

    def _commit(self) -> None:
        """The engine thread's part of writing `DonatedSlots`."""
        with self._finished:
            staged, self._staged = self._staged, []
            if staged:
                self._work.notify()  # there is room again
        if staged:
            transfers, blocks = zip(*staged, strict=True)
            self.slots.commit([transfer.slot for transfer in transfers], blocks)
            for transfer in transfers:
                transfer.state = "done"

    def _write(self, run: Sequence[Transfer], sources: Sequence) -> None:
        """One copy a row: neighbours in the store seldom get neighbouring slots."""
        for transfer, source_R in zip(run, sources, strict=True):
            self.slots.write(transfer.slot, source_R)

    def _carry(self, run: Sequence[Transfer], copy: Callable, *args):
        """One transfer over the link, accounted for."""
        num_bytes = sum(transfer.num_bytes for transfer in run)
        start_s, end_s, result = self.link.transfer(
            num_bytes, run[0].requested_s, copy, *args
        )
        self._carried(run, start_s, end_s)
        now_s = self._clock()
        for transfer in run:  # not before it is copied
            transfer.arrival_s = max(end_s, now_s)
        if self.recorder.enabled:
            self._record(run, start_s)
        return result

    def _record(self, run: Sequence[Transfer], start_s: float) -> None:
        """An event a block: those of a common transfer share its time."""
        recorder = self.recorder
        for transfer in run:
            expert, sub = divmod(transfer.expert, self.store.subs)
            recorder.add(
                "transfer",
                recorder.clock.at(start_s),
                transfer.seconds,
                transfer.cause,
                step=transfer.step,
                layer=transfer.layer,
                expert=expert,
                sub=sub,
                bytes=transfer.num_bytes,
            )
            start_s += transfer.seconds

    def _run(self) -> None:
        """The background thread. What it shares with the engine it locks for moving
        entries of lists only, never for a copy."""
        try:
            while (run := self._next()) is not None:
                sources = [self._source(t.layer, t.expert) for t in run]
                if self.slots.safe_in_thread:
                    self._carry(run, self._write, run, sources)
                    with self._finished:
                        for transfer in run:
                            transfer.state = "done"
                        if all(t.state == "done" for t in self._awaited):
                            self._finished.notify()
                else:
                    staged = self._carry(run, self.slots.stage, sources)
                    with self._finished:
                        self._staged.extend(zip(run, staged, strict=True))
                        self._finished.notify()
        except BaseException as error:  # handed to the engine, which raises it
            with self._finished:
                self._error = error
                self._finished.notify()

    def _next(self) -> list[Transfer] | None:
        """The next blocks to carry as one, now running; None when the queue closes."""
        self.link.rest()  # chosen late, so that a demand may still overtake
        with self._work:
            while not self._closed:
                waiting = self._next_queue()
                room = self.slots.max_staged - len(self._staged)
                if waiting and room > 0:
                    if self.slots.safe_in_thread:
                        return self._take(waiting)
                    # A device's own link carries demands one behind the other; who
                    # prefetches several at once cannot be overtaken.
                    is_demand = waiting is self._queues["demand"]
                    apart = is_demand and not self.link.emulated
                    return self._take(waiting, room, apart)
                self._work.wait()
        return None


def refuse_cancelled(transfers: Iterable[Transfer]) -> None:
    """Raises RuntimeError if one of them will never arrive."""
    for transfer in transfers:
        if transfer.state == "cancelled":
            raise RuntimeError(
                f"layer {transfer.layer}, expert {transfer.expert}: waiting for a "
                "transfer that was cancelled"
            )
