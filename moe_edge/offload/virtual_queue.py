"""The queue of expert blocks in computed time: what replay and simulator run on."""

from collections.abc import Iterable, Sequence

from moe_edge.offload.block_queue import BlockQueue, Transfer
from moe_edge.offload.link import EmulatedLink


class VirtualQueue(BlockQueue):
    """Carries blocks over an emulated link; the caller moves `now_s` on and polls.

    Attributes:
      now_s: the present.
      free_s: when the link has delivered what it has begun.
      transfer_s: how long a block alone occupies the link.
    """

    def __init__(self, link: EmulatedLink, block_bytes: int, num_experts: int):
        self.now_s = self.free_s = 0.0
        self.transfer_s = link.seconds(block_bytes)
        self.link = link
        super().__init__(block_bytes, num_experts, lambda: self.now_s)

    def poll(self) -> None:
        """Begins every transfer that begins before now."""
        while (waiting := self._next_queue()) is not None:
            if max(self.free_s, waiting[0].requested_s) >= self.now_s:
                return
            self._begin(self._take(waiting))

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Moves on to when all are done: the seconds it took."""
        transfers, start_s = list(transfers), self.now_s
        while any(transfer.state == "queued" for transfer in transfers):
            self._begin(self._take(self._next_queue()))
        self.now_s = max([start_s, *(transfer.arrival_s for transfer in transfers)])
        self.poll()
        self._wait_s += self.now_s - start_s
        return self.now_s - start_s

    def _begin(self, run: Sequence[Transfer]) -> None:
        start_s = max(self.free_s, run[0].requested_s)
        seconds = self.transfer_s
        if len(run) > 1:
            seconds = self.link.seconds(sum(transfer.num_bytes for transfer in run))
        self.free_s = start_s + seconds
        for transfer in run:  # as on an emulated link: here, its arrival dated
            transfer.state = "done"
        self._carried(run, start_s, self.free_s)
