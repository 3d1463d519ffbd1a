"""One transfer of an expert block, and the sums over many."""

import dataclasses
from collections.abc import Callable

from moe_edge.core.events import Total


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """One requested transfer, which only its queue changes; times are of its clock.

    Attributes:
      layer, expert, slot: which block goes where.
      key: layer * E + expert.
      cause: one of `core.events.CAUSES`.
      step: as the caller counts, for the event; or None.
      requested_s: when.
      clock: tells the time, real or computed.
      state: "queued", "running", "done" (copied) or "cancelled".
      seconds: on the link, once it is copied.
      arrival_s: when the link has delivered it; known once it is copied, and after
        the copy's end on an emulated or a computed link.
      done: the slot holds the block and the link has delivered it.
    """

    layer: int
    expert: int
    slot: int
    key: int
    cause: str
    step: int | None
    requested_s: float
    clock: Callable[[], float] = dataclasses.field(repr=False)
    state: str = "queued"
    seconds: float = 0.0
    arrival_s: float = 0.0

    @property
    def done(self) -> bool:
        return self.state == "done" and self.clock() >= self.arrival_s


@dataclasses.dataclass(frozen=True)
class TransferStats:
    """Sums since the queue was made, or its statistics were reset.

    Attributes:
      demand, prefetch: transfers, bytes and seconds on the link.
      wasted_bytes: prefetched blocks that were overwritten before any use.
      unused_bytes: prefetched blocks still waiting for their first use.
      cancelled: prefetches taken back before they began.
      wait_s: how long callers of `wait` (and of a serial `request`) stood still.
    """

    demand: Total
    prefetch: Total
    wasted_bytes: int
    unused_bytes: int
    cancelled: int
    wait_s: float
