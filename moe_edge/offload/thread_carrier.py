"""Blocks are carried by a thread of their own: from a disk, from pinned memory."""

import threading
from collections.abc import Iterable, Sequence
from time import perf_counter

from moe_edge.offload.carrier import Transfer, refuse_cancelled
from moe_edge.offload.link import wait_until
from moe_edge.offload.real_carrier import RealCarrier


class ThreadCarrier(RealCarrier):
    """Moves blocks into slots by a thread, which lives until `close`.

    The thread writes slots that allow it (`safe_in_thread`); for the others it brings
    blocks to the device, and `wait` and `poll` put them into their slots.
    """

    def __init__(self, *given, **options):
        self._staged: list[tuple[Transfer, object]] = []
        self._awaited: Sequence[Transfer] = ()  # the end of all wakes the engine
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # the thread waits for requests
        self._finished = threading.Condition(lock)  # the engine waits for blocks
        super().__init__(*given, lock=lock, **options)
        self._start()

    def _start(self) -> None:
        self.thread = threading.Thread(
            target=self._run, name="moe_edge-queue", daemon=True
        )
        self.thread.start()

    def catch_up(self) -> None:
        self.check()

    def ask(self, cause: str, transfers: Sequence[Transfer]) -> None:
        super().ask(cause, transfers)
        with self._work:
            self._work.notify()

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """The thread has begun with them."""

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """As `Carrier.wait`.

        Raises:
          RuntimeError: a transfer was cancelled, or the carrier is closed; whatever the
          thread died of.
        """
        transfers = list(transfers)
        start_s = perf_counter()
        while not all(transfer.state == "done" for transfer in transfers):
            refuse_cancelled(transfers)
            with self._finished:
                self.check()
                while not self._staged or self._is_partial(transfers):
                    open_transfers = [t for t in transfers if t.state != "done"]
                    if not open_transfers:
                        break
                    self._awaited = open_transfers
                    self._finished.wait()
                    self.check()
            self._commit()
        if transfers:
            wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s = perf_counter() - start_s
        self.wait_s += waited_s
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
        self.check()
        self._commit()

    def close(self) -> None:
        """Finishes the transfer under way, drops the others and ends the thread."""
        with self._work:
            super().close()
            self._work.notify()
        self.thread.join()

    def recover(self) -> None:
        """As `Carrier.recover`; a thread that died of the error has a successor."""
        self.close()
        super().recover()
        self._staged, self._awaited = [], ()
        self._start()

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

    def _run(self) -> None:
        """The thread. What it shares with the engine it locks for moving entries of
        lists only, never for a copy."""
        try:
            while (run := self._next_run()) is not None:
                if self.slots.safe_in_thread:
                    self._carry(run, self._write)
                    with self._finished:
                        for transfer in run:
                            transfer.state = "done"
                        if all(t.state == "done" for t in self._awaited):
                            self._finished.notify()
                else:
                    staged = self._carry(run, self._stage)
                    with self._finished:
                        self._staged.extend(zip(run, staged, strict=True))
                        self._finished.notify()
        except BaseException as error:  # handed to the engine, which raises it
            with self._finished:
                self._error = error
                self._finished.notify()

    def _stage(self, run: Sequence[Transfer], sources: Sequence) -> list:
        return self.slots.stage(sources)

    def _next_run(self) -> list[Transfer] | None:
        """The next blocks to carry as one, now running; None when the queue closes."""
        self.link.rest()  # chosen late, so that a demand may still overtake
        with self._work:
            while not self._closed:
                waiting = self._next()
                room = self.slots.max_staged - len(self._staged)
                if waiting and room > 0:
                    if self.slots.safe_in_thread:
                        return self._take(waiting)
                    # A device's own link carries demands one behind the other; who
                    # prefetches several at once cannot be overtaken.
                    is_demand = waiting is self._waiting["demand"]
                    apart = is_demand and not self.link.emulated
                    return self._take(waiting, room, apart)
                self._work.wait()
        return None
