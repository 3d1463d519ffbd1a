"""The queue of a machine whose device is the host's own CPU: its user carries blocks.

A GPU copies while its programs run. On a CPU a thread that copies takes a core from
the programs, and whoever plans waits for Python's lock and for that thread to wake up.
So blocks are copied by the thread that asks for them, looks or waits, and an emulated
link dates them as if it had begun when it was free.
"""

import time
from collections.abc import Iterable, Sequence

from moe_edge.kernels import native
from moe_edge.offload.block_queue import Transfer
from moe_edge.offload.link import wait_until
from moe_edge.offload.transfer_queue import TransferQueue, refuse_cancelled


class CarriedQueue(TransferQueue):
    """Moves blocks into slots in the thread that calls it, when the link is free.

    A transfer begins when somebody looks after the link became free, and is dated to
    when it became free, though it arrives no earlier than it is copied. Whatever
    changes the order looks first, so nothing is overtaken that would have begun. A link
    that is not emulated is always free. Copying what is demanded counts as waiting.
    """

    def __init__(self, *given, **options):
        """As `TransferQueue`, without a thread."""
        super().__init__(*given, **options, asynchronous=False)

    def _catch_up(self) -> None:
        self.poll()

    def _carry_now(self, transfers: Sequence[Transfer]) -> None:
        self.poll()

    def poll(self) -> None:
        """Begins every transfer that begins before now.

        Raises: what a copy raised, from then on.
        """
        self._check()
        while (waiting := self._next_queue()) is not None:
            if max(self.link.free_s, waiting[0].requested_s) > self._clock():
                return
            self._begin()

    def begin(self, transfers: Iterable[Transfer]) -> None:
        transfers = list(transfers)
        while any(transfer.state == "queued" for transfer in transfers):
            self._begin()

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """As `TransferQueue.wait`; copying demands since the last wait is counted."""
        transfers = list(transfers)
        if not transfers:
            return 0.0
        self._check()
        refuse_cancelled(transfers)
        start_s, self._copied_s = time.perf_counter() - self._copied_s, 0.0
        self.begin(transfers)
        wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s, self._copied_s = time.perf_counter() - start_s, 0.0
        self._wait_s += waited_s
        return waited_s

    def recover(self) -> None:
        """As `TransferQueue.recover`."""
        super().recover()
        self._copied_s = 0.0

    def reset_stats(self) -> None:
        """As `BlockQueue.reset_stats`."""
        super().reset_stats()
        self._copied_s = 0.0  # copying demands, since somebody last waited

    def _write(self, run: Sequence[Transfer], sources: Sequence) -> None:
        for transfer, source_R in zip(run, sources, strict=True):
            native.copy(self.slots.row(transfer.slot), source_R)  # by all cores

    def _begin(self) -> None:
        begun_s, waiting = time.perf_counter(), self._next_queue()
        is_demand = waiting[0].cause == "demand"
        try:
            self._carry_next(waiting)
        except Exception as error:
            self._error = error
            raise
        except BaseException:  # by a signal
            self._error = RuntimeError(
                "a transfer was interrupted; call the engine's `recover`"
            )
            raise
        if is_demand:
            self._copied_s += time.perf_counter() - begun_s
