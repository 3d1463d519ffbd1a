"""What the lookups of a run met."""

import dataclasses


@dataclasses.dataclass
class Counters:
    """What lookups of one phase met.

    Attributes:
      hits, misses: distinct experts of a lookup that were, or were not, in slots.
      late: hits whose prefetch was still on its way.
      wait_s: seconds that the engine stood still for transfers.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    wait_s: float = 0.0

    @property
    def hit_ratio(self) -> float | None:
        total = self.hits + self.misses
        return self.hits / total if total else None
