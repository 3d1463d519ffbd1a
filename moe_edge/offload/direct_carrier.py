"""Blocks from pinned memory, where demands need no thread and no wait."""

from collections.abc import Sequence

from moe_edge.offload.carrier import Transfer
from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.thread_carrier import ThreadCarrier


class DirectCarrier(ThreadCarrier):
    """Demands are fetched by programs that the engine's thread dispatches at once.

    The device runs programs in order, so a layer dispatched next finds its blocks, and
    its dispatch overlaps their transfer. Prefetches travel by the thread.

    A demand's seconds are those of its dispatch alone, unless `timed`.

    Args:
      timed: a demand returns once it has arrived: for who reads times (events, a trace,
        rules that compare rates).
    """

    slots: IndexedSlots

    def __init__(self, *given, timed: bool = False, **options):
        self._timed = timed
        super().__init__(*given, **options)
        self.slots.prepare_fetches()

    def ask(self, cause: str, transfers: Sequence[Transfer]) -> None:
        if cause != "demand":
            super().ask(cause, transfers)
            return
        state = "cancelled"
        try:
            self._carry(transfers, self._fetch)
            state = "done"
        finally:
            for transfer in transfers:
                transfer.state = state

    def _fetch(self, transfers: Sequence[Transfer], sources: Sequence) -> None:
        self.slots.fetch([transfer.slot for transfer in transfers], sources)
        if self._timed:
            self.slots.array.block_until_ready()

    def _carried(self, run, start_s: float, end_s: float) -> None:
        with self._lock:  # both threads carry
            super()._carried(run, start_s, end_s)
