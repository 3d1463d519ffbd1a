"""Blocks are copied from a store into slots, in real time: by whoever asks for them.

A GPU copies while its programs run. On a CPU a thread that copies takes a core from
the programs, and whoever plans waits for Python's lock and for that thread to wake up.
So there the engine's thread copies, when it asks, looks or waits, and an emulated link
dates blocks as if it had begun when it was free.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from moe_edge.core.events import Recorder
from moe_edge.offload.carrier import Carrier, Transfer, refuse_cancelled
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


class RealCarrier(Carrier):
    """Copies blocks of a store into slots, in real time."""

    def __init__(
        self,
        store: Blocks,
        slots: Slots,
        link: TransferLink | None = None,
        recorder: Recorder | None = None,
        lock=None,
    ):
        self.store, self.slots = store, slots
        self.recorder = Recorder(enabled=False) if recorder is None else recorder
        # What the slots copy from: a record, or what the device reads by itself.
        self._source = store.record if slots.safe_in_thread else store.source
        self._error: BaseException | None = None
        self._closed = False
        given = store.block_bytes, store.num_experts, time.perf_counter, lock
        super().__init__(TransferLink() if link is None else link, *given)

    def num_bytes(self, layer: int, expert: int) -> int:
        return self.store.num_bytes(layer, expert)

    def check(self) -> None:
        """Raises what went wrong, from then on; RuntimeError: it is closed."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the queue is closed")

    def close(self) -> None:
        self._closed = True

    def recover(self) -> None:
        super().recover()
        self._error, self._closed = None, False
        self.slots.recover()

    def _write(self, run: Sequence[Transfer], sources: Sequence) -> None:
        """One copy a row: neighbours in the store seldom get neighbouring slots."""
        for transfer, source_R in zip(run, sources, strict=True):
            self.slots.write(transfer.slot, source_R)

    def _carry(self, run: Sequence[Transfer], copy: Callable):
        """One transfer over the link by `copy(run, sources)`, accounted for."""
        num_bytes = sum([transfer.num_bytes for transfer in run])
        sources = [self._source(t.layer, t.expert) for t in run]
        start_s, end_s, result = self.link.transfer(
            num_bytes, run[0].requested_s, copy, run, sources
        )
        self._carried(run, start_s, end_s)
        now_s = self.clock()
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


class CallerCarrier(RealCarrier):
    """Moves blocks into slots in the thread that calls it, when the link is free.

    A transfer begins when somebody looks after the link became free, and is dated to
    when it became free, though it arrives no earlier than it is copied. Whatever
    changes the order looks first, so nothing is overtaken that would have begun. A link
    that is not emulated is always free. Copying what is demanded counts as waiting.

    Args:
      copy: `(row_R, record_R)` fills a row, such as by all cores; None: `slots.write`.
      serial: a request is carried out before it returns: the reference, same bytes, no
        overlap. An error cancels what it reaches, and the next request is carried.
    """

    def __init__(
        self,
        *given,
        copy: Callable[[np.ndarray, np.ndarray], None] | None = None,
        serial: bool = False,
        **options,
    ):
        super().__init__(*given, **options)
        self._copy, self._serial = copy, serial

    def catch_up(self) -> None:
        self.poll()

    def ask(self, cause: str, transfers: Sequence[Transfer]) -> None:
        super().ask(cause, transfers)
        if self._serial:
            self._finish(transfers, transfers[0].requested_s)
        else:
            self.poll()

    def poll(self) -> None:
        """As `Carrier.poll`.

        Raises: what a copy raised, from then on.
        """
        self.check()
        super().poll()

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """As `Carrier.wait`; copying demands since the last wait is counted.

        Raises:
          RuntimeError: a transfer was cancelled, or the carrier is closed; what a copy
          raised.
        """
        transfers = list(transfers)
        if not transfers:
            return 0.0
        self.check()
        refuse_cancelled(transfers)
        return self._finish(transfers, time.perf_counter() - self._copied_s)

    def _finish(self, transfers: Sequence[Transfer], start_s: float) -> float:
        """Returns when all are there: the seconds since it started to be waited."""
        self.begin(transfers)
        wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s, self._copied_s = time.perf_counter() - start_s, 0.0
        self.wait_s += waited_s
        return waited_s

    def reset_stats(self) -> None:
        super().reset_stats()
        self._copied_s = 0.0  # copying demands, since somebody last waited

    def recover(self) -> None:
        super().recover()
        self._copied_s = 0.0

    def _begin(self, run: Sequence[Transfer]) -> None:
        begun_s = time.perf_counter()
        try:
            self._carry(run, self._write)
        except BaseException as error:
            self._failed(run, error)
            raise
        for transfer in run:
            transfer.state = "done"
        if run[0].cause == "demand":
            self._copied_s += time.perf_counter() - begun_s

    def _write(self, run: Sequence[Transfer], sources: Sequence) -> None:
        if self._copy is None:
            super()._write(run, sources)
            return
        for transfer, source_R in zip(run, sources, strict=True):
            self._copy(self.slots.row(transfer.slot), source_R)

    def _failed(self, run: Sequence[Transfer], error: BaseException) -> None:
        if self._serial:
            for transfer in run:
                transfer.state = "cancelled"
            self._forget()
        elif isinstance(error, Exception):
            self._error = error
        else:  # by a signal
            self._error = RuntimeError(
                "a transfer was interrupted; call the engine's `recover`"
            )
