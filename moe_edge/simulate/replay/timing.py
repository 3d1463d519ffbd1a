"""What a decode step costs, and what a timed replay says about a whole trace."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.core.checks import check_from_zero, check_positive, check_shape
from moe_edge.offload.link import EmulatedLink


@dataclasses.dataclass(frozen=True, eq=False)
class CostModel:
    """What a decode step costs, measured or assumed.

    Attributes:
      route_s: seconds until a layer's routing is known (attention, router, read-back);
        one number, or one a layer of the model.
      experts_s: seconds of its experts once they are there; likewise.
      step_s: seconds a step outside the layers (embedding, head, sampling).
      block_bytes: of one expert block.
      link: rate and latency.
    """

    route_s: float | Sequence[float]
    experts_s: float | Sequence[float]
    block_bytes: int
    link: EmulatedLink
    step_s: float = 0.0

    def __post_init__(self):
        check_positive("block_bytes", self.block_bytes)
        for name in ("route_s", "experts_s", "step_s"):
            for seconds in np.ravel(getattr(self, name)):
                check_from_zero(name, seconds)

    def layers(self, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """route_s and experts_s as float64 [L].

        Raises:
          ConfigError: as many numbers as another model has layers.
        """
        both = [np.asarray(s, np.float64) for s in (self.route_s, self.experts_s)]
        for name, seconds in zip(("route_s", "experts_s"), both, strict=True):
            if seconds.ndim:
                check_shape(name, seconds, (num_layers,))
        return tuple(np.broadcast_to(seconds, (num_layers,)) for seconds in both)


@dataclasses.dataclass(frozen=True)
class TimedResult:
    """What the decode steps of a trace would take.

    Attributes:
      step_s: float64 [steps], duration of each.
      hits: experts that were there when their layer was routed.
      late: prefetched, and not yet there.
      misses: neither.
      demand_bytes, prefetch_bytes: moved, by the cause with which a transfer began.
      wasted_bytes: prefetched and overwritten before use.
      unused_bytes: prefetched and not used by the end.
      cancelled: prefetches taken back before they began.
      wait_s: compute stood still for so long, over all steps.
      resident_s: a step's compute, that is its duration if nothing had to move.
      link_s: how long the link was busy, over all steps.
    """

    step_s: np.ndarray
    hits: int
    late: int
    misses: int
    demand_bytes: int
    prefetch_bytes: int
    wasted_bytes: int
    unused_bytes: int
    cancelled: int
    wait_s: float
    resident_s: float
    link_s: float

    @property
    def tpot_s(self) -> float:
        """Mean time per output token (of a batch: per step)."""
        return float(self.step_s.mean())

    @property
    def hit_ratio(self) -> float:
        """Share of lookups whose expert was there in time."""
        return self.hits / (self.hits + self.late + self.misses)

    @property
    def bound_s(self) -> float:
        """max(compute, link) a step: what perfect overlap of these bytes would take."""
        return max(self.resident_s, self.link_s / len(self.step_s))
