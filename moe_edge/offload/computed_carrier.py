"""Blocks are carried in computed time: what replay and simulator run on."""

import copy
from collections.abc import Callable, Iterable, Sequence

from moe_edge.offload.carrier import Carrier, Transfer
from moe_edge.offload.link import EmulatedLink


class ComputedCarrier(Carrier):
    """Carries blocks over an emulated link; the caller moves `now_s` on and polls.

    Attributes:
      now_s: the present.
      transfer_s: how long a block alone occupies the link.

    Args:
      link: its rate and latency; what it carries elsewhere is another matter.
      clock: tells another time than `now_s`, of a subclass that waits for it.
    """

    link: EmulatedLink

    def __init__(
        self,
        link: EmulatedLink,
        block_bytes: int,
        num_experts: int,
        clock: Callable[[], float] | None = None,
    ):
        self.now_s, link = 0.0, copy.copy(link)
        link.free_s = 0.0
        self.transfer_s = link.seconds(block_bytes)
        super().__init__(link, block_bytes, num_experts, clock or (lambda: self.now_s))

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Moves on to when all are done: the seconds it took."""
        transfers, start_s = list(transfers), self.clock()
        self.begin(transfers)
        self._move_on(max([start_s, *(transfer.arrival_s for transfer in transfers)]))
        self.poll()
        waited_s = self.clock() - start_s
        self.wait_s += waited_s
        return waited_s

    def _move_on(self, moment_s: float) -> None:
        """It is this moment now."""
        self.now_s = moment_s

    def _begin(self, run: Sequence[Transfer]) -> None:
        start_s = max(self.link.free_s, run[0].requested_s)
        seconds = self.transfer_s
        if len(run) > 1:
            seconds = self.link.seconds(sum(transfer.num_bytes for transfer in run))
        end_s = self.link.free_s = start_s + seconds
        for transfer in run:  # as on an emulated link: here, its arrival dated
            transfer.state = "done"
        self._carried(run, start_s, end_s)
