"""A lookup and what followed from it: the record that `layer_step.LayerStep` keeps."""

import dataclasses

from moe_edge.offload.carrier import Transfer


@dataclasses.dataclass(eq=False, slots=True)
class LayerVisit:
    """A layer of a step, from its lookup to its dispatch."""

    layer: int
    step: int
    is_decode: bool
    hits: list[int]  # experts that needed no transfer; in waves some may still come to
    late: list[int]  # prefetched experts that were still on their way at the lookup
    misses: list[int]  # absent at the lookup, best first
    chosen: list[int]  # all of these at the lookup
    begun_s: float  # when, in the run's time, where events are recorded
    may_prefetch: bool
    # Experts asked for on demand or computed elsewhere, each time.
    missed: list[int] = dataclasses.field(default_factory=list)
    transfers: list[Transfer] = dataclasses.field(default_factory=list)  # waited for
    moved: int = 0  # how many transfers were demanded
    waited_s: float = 0.0
    in_waves: bool = False  # it passed in waves

    @property
    def travels(self) -> bool:
        """Whether something was asked for that the layer waits for."""
        return bool(self.transfers)

    def thrown_out(self, experts: list[int]) -> None:
        """Of these, the wave before, or draining for it, has thrown out the hits."""
        self.hits = [expert for expert in self.hits if expert not in experts]
        self.late = [expert for expert in self.late if expert not in experts]
