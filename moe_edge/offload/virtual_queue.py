"""The queue of expert blocks in computed time: what replay and simulator run on."""

from collections.abc import Callable, Iterable, Sequence

from moe_edge.offload.block_queue import BlockQueue, Transfer
from moe_edge.offload.link import EmulatedLink


class VirtualQueue(BlockQueue):
    """Carries blocks over an emulated link; the caller moves `now_s` on and polls.

    Attributes:
      now_s: the present.
      free_s: when the link has delivered what it has begun.
      transfer_s: how long a block alone occupies the link.

    Args:
      clock: tells another time than `now_s`, of a subclass that waits for it.
    """

    def __init__(
        self,
        link: EmulatedLink,
        block_bytes: int,
        num_experts: int,
        clock: Callable[[], float] | None = None,
    ):
        self.now_s = self.free_s = 0.0
        self.transfer_s = link.seconds(block_bytes)
        self.link = link
        super().__init__(block_bytes, num_experts, clock or (lambda: self.now_s))

    def poll(self) -> None:
        """Begins every transfer that begins before now."""
        while (waiting := self._next_queue()) is not None:
            if max(self.free_s, waiting[0].requested_s) >= self._clock():
                return
            self._begin(self._take(waiting))

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Moves on to when all are done: the seconds it took."""
        transfers, start_s = list(transfers), self._clock()
        while any(transfer.state == "queued" for transfer in transfers):
            self._begin(self._take(self._next_queue()))
        self._move_on(max([start_s, *(transfer.arrival_s for transfer in transfers)]))
        self.poll()
        waited_s = self._clock() - start_s
        self._wait_s += waited_s
        return waited_s

    def _move_on(self, moment_s: float) -> None:
        """It is this moment now."""
        self.now_s = moment_s

    def _begin(self, run: Sequence[Transfer]) -> None:
        start_s = max(self.free_s, run[0].requested_s)
        seconds = self.transfer_s
        if len(run) > 1:
            seconds = self.link.seconds(sum(transfer.num_bytes for transfer in run))
        self.free_s = start_s + seconds
        for transfer in run:  # as on an emulated link: here, its arrival dated
            transfer.state = "done"
        self._carried(run, start_s, self.free_s)
