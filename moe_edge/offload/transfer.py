"""The one mover of expert blocks from the store to the device's slots."""

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
from moe_edge.offload.ticket import CAUSES, MoverStats, Ticket


class Mover:
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
        self._queues: dict[str, deque[Ticket]] = {cause: deque() for cause in CAUSES}
        self._staged: list[tuple[Ticket, object]] = []
        self._in_slot: dict[int, Ticket] = {}  # the latest request of every slot
        self._unused: dict[int, Ticket] = {}  # prefetches by key until first used
        self._totals = {cause: Total() for cause in CAUSES}
        self._wasted_bytes = self._cancelled = 0
        self._wait_s = 0.0
        self._awaited: Ticket | None = None  # whose end wakes the engine
        self._error: BaseException | None = None
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # the thread waits for requests
        self._finished = threading.Condition(lock)  # the engine waits for blocks
        self._thread = None
        if asynchronous:
            self._thread = threading.Thread(
                target=self._run, name="moe_edge-mover", daemon=True
            )
            self._thread.start()

    def request(
        self, layer: int, expert: int, slot: int, cause: str, step: int | None = None
    ) -> Ticket:
        """Asks for a block in a slot.

        Args:
          layer, expert: the block; the model's layer index, a block of the layer.
          slot: its row; no program in flight may read it (`AliasedSlots`), and no
            queued request may aim at it.
          cause: "demand" or "prefetch".
          step: stored with the event.
        Raises:
          RuntimeError: a queued request aims at the same slot, or the mover is closed;
          whatever the thread died of.
        """
        check_known("transfer cause", cause, CAUSES)
        if not 0 <= slot < self.slots.num_slots:
            raise IndexError(f"slot {slot}; there are {self.slots.num_slots}")
        now_s = time.perf_counter()
        key = layer * self.store.num_experts + expert
        ticket = Ticket(layer, expert, slot, key, cause, step, now_s)
        with self._work:
            self._check()
            self._occupy(ticket)
            if self.asynchronous:
                self._queues[cause].append(ticket)
                self._work.notify()
        if not self.asynchronous:
            ticket.state = "running"
            source_R = self._source(layer, expert)
            self._carry(ticket, self.slots.write, slot, source_R)
            ticket.state = "done"
            wait_until(ticket.arrival_s)
            self._wait_s += time.perf_counter() - now_s
        return ticket

    def wait(self, tickets: Iterable[Ticket]) -> float:
        """Returns when all blocks are in their slots: the seconds it took.

        Raises:
          RuntimeError: a ticket was cancelled, or the mover is closed; whatever the
          thread died of.
        """
        tickets = list(tickets)
        start_s = time.perf_counter()
        while not all(ticket.state == "done" for ticket in tickets):
            for ticket in tickets:
                if ticket.state == "cancelled":
                    raise RuntimeError(
                        f"layer {ticket.layer}, expert {ticket.expert}: waiting for a "
                        "transfer that was cancelled"
                    )
            with self._finished:
                self._check()
                while not self._staged:
                    open_tickets = [t for t in tickets if t.state != "done"]
                    if not open_tickets:
                        break
                    self._awaited = open_tickets[-1]
                    self._finished.wait()
                    self._check()
            self._commit()
        if tickets:
            wait_until(max(ticket.arrival_s for ticket in tickets))
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

    def promote(self, ticket: Ticket) -> None:
        """The block is needed now: a queued prefetch becomes the last demand."""
        with self._work:
            if ticket.state == "queued" and ticket.cause == "prefetch":
                self._queues["prefetch"].remove(ticket)
                ticket.cause = "demand"
                self._queues["demand"].append(ticket)
        self.used(ticket)

    def used(self, block: Ticket | int) -> None:
        """A block (or its key) was computed with: its prefetch was no waste."""
        key = block.key if isinstance(block, Ticket) else block
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
            cancelled = [ticket for ticket in queued if not keeps(ticket.key)]
            for ticket in cancelled:
                ticket.state = "cancelled"
            self._queues["prefetch"] = deque(t for t in queued if t.state == "queued")
        for ticket in cancelled:
            self._unused.pop(ticket.key, None)
        self._cancelled += len(cancelled)
        return [(ticket.layer, ticket.expert, ticket.slot) for ticket in cancelled]

    def stats(self) -> MoverStats:
        with self._work:
            totals = {c: dataclasses.replace(t) for c, t in self._totals.items()}
        unused = sum(ticket.state == "done" for ticket in self._unused.values())
        return MoverStats(
            **totals,
            wasted_bytes=self._wasted_bytes,
            unused_bytes=unused * self.store.block_bytes,
            cancelled=self._cancelled,
            wait_s=self._wait_s,
        )

    def close(self) -> None:
        """Finishes the transfer under way, drops the others and ends the thread."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "Mover":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the mover is closed")

    def _occupy(self, ticket: Ticket) -> None:
        """Accounts for what the slot held before."""
        last = self._in_slot.get(ticket.slot)
        if last is not None:
            if last.state == "queued":
                raise RuntimeError(
                    f"slot {ticket.slot} awaits layer {last.layer}, expert "
                    f"{last.expert}; cancel that or wait for it first"
                )
            if self._unused.get(last.key) is last:
                del self._unused[last.key]
                self._wasted_bytes += self.store.block_bytes
        self._in_slot[ticket.slot] = ticket
        if ticket.cause == "prefetch":
            self._unused[ticket.key] = ticket

    def _commit(self) -> None:
        """The engine thread's part of writing `DonatedSlots`."""
        with self._finished:
            staged, self._staged = self._staged, []
            if staged:
                self._work.notify()  # there is room again
        for ticket, block in staged:
            self.slots.commit(ticket.slot, block)
            ticket.state = "done"

    def _carry(self, ticket: Ticket, copy: Callable, *args):
        """One transfer over the link, accounted for."""
        num_bytes = self.store.block_bytes
        start_s, end_s, result = self.link.transfer(
            num_bytes, ticket.requested_s, copy, *args
        )
        total = self._totals[ticket.cause]
        total.count += 1
        total.bytes += num_bytes
        total.seconds += end_s - start_s
        ticket.seconds, ticket.arrival_s = end_s - start_s, end_s
        recorder = self.recorder
        if recorder.enabled:
            expert, sub = divmod(ticket.expert, self.store.subs)
            recorder.add(
                "transfer",
                recorder.clock.at(start_s),
                end_s - start_s,
                ticket.cause,
                step=ticket.step,
                layer=ticket.layer,
                expert=expert,
                sub=sub,
                bytes=num_bytes,
            )
        return result

    def _run(self) -> None:
        """The background thread."""
        try:
            while (ticket := self._next()) is not None:
                source_R = self._source(ticket.layer, ticket.expert)
                if self.slots.safe_in_thread:
                    self._carry(ticket, self.slots.write, ticket.slot, source_R)
                    with self._finished:
                        ticket.state = "done"
                        if ticket is self._awaited:
                            self._finished.notify()
                else:
                    block = self._carry(ticket, self.slots.stage, source_R)
                    with self._finished:
                        self._staged.append((ticket, block))
                        self._finished.notify()
        except BaseException as error:  # handed to the engine, which raises it
            with self._finished:
                self._error = error
                self._finished.notify()

    def _next(self) -> Ticket | None:
        """The next ticket, now running; None when the mover closes."""
        self.link.rest()  # chosen late, so that a demand may still overtake
        with self._work:
            while not self._closed:
                queue = self._queues["demand"] or self._queues["prefetch"]
                if queue and len(self._staged) < self.slots.max_staged:
                    ticket = queue.popleft()
                    ticket.state = "running"
                    return ticket
                self._work.wait()
        return None
