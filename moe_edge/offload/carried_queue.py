"""The queue of a machine whose device is the host's own CPU: its user carries blocks.

A device of its own has an engine that copies while programs run. On a CPU a thread
that copies takes a core from the programs, and Python's lock and a wake-up from
whoever plans: so blocks are copied by the thread that asks for them, looks or waits,
and an emulated link dates their arrival as if it had begun when it was free.
"""

import time
from collections.abc import Iterable, Sequence

from moe_edge.core.events import Recorder
from moe_edge.kernels import native
from moe_edge.offload.block_queue import Transfer
from moe_edge.offload.link import Link, wait_until
from moe_edge.offload.slots import Slots
from moe_edge.offload.transfer_queue import Blocks, TransferQueue, refuse_cancelled


class CarriedQueue(TransferQueue):
    """Moves blocks into slots in the thread that calls it, when the link is free.

    A transfer begins when somebody looks (`request_all`, `poll`, `wait`) after the link
    became free, and is dated to that moment; until then it can be overtaken or taken
    back. A link that is not emulated is always free.
    """

    def __init__(
        self,
        store: Blocks,
        slots: Slots,
        link: Link | None = None,
        recorder: Recorder | None = None,
    ):
        super().__init__(store, slots, link, recorder, asynchronous=False)

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

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """As `TransferQueue.wait`."""
        self._check()
        transfers, start_s = list(transfers), time.perf_counter()
        refuse_cancelled(transfers)
        while any(transfer.state == "queued" for transfer in transfers):
            self._begin()
        if transfers:
            wait_until(max(transfer.arrival_s for transfer in transfers))
        waited_s = time.perf_counter() - start_s
        self._wait_s += waited_s
        return waited_s

    def _write(self, run: Sequence[Transfer], sources: Sequence) -> None:
        for transfer, source_R in zip(run, sources, strict=True):
            native.copy(self.slots.row(transfer.slot), source_R)  # by all cores

    def _begin(self) -> None:
        try:
            self._carry_next(self._next_queue())
        except BaseException as error:
            self._error = error
            raise
