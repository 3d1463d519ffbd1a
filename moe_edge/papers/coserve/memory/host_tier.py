"""Host memory below a pool: experts that left it stay until others need the room."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from moe_edge.core.checks import check_count


class HostTier:
    """Experts that are in no pool but in host memory; the least recent one goes first.

    An expert is in the pool or here, not in both, so that both memories together hold
    as many as they can.

    Attributes:
      budget_bytes: of it; used_bytes: that are taken.
    """

    def __init__(self, budget_bytes: int, sizes: Sequence[int]):
        check_count("budget_bytes", budget_bytes)
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self._sizes = sizes
        self._held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, expert: int) -> bool:
        return expert in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, expert: int) -> bool:
        """An expert goes to a pool: whether it was here."""
        if expert not in self._held:
            return False
        del self._held[expert]
        self.used_bytes -= self._sizes[expert]
        return True

    def keep(self, experts: Iterable[int]) -> list[int]:
        """Experts that leave a pool come here: who goes for them, or is too large."""
        dropped = []
        for expert in experts:
            if self._sizes[expert] > self.budget_bytes:
                dropped.append(expert)
                continue
            self.take(expert)
            self._held[expert] = None
            self.used_bytes += self._sizes[expert]
            while self.used_bytes > self.budget_bytes:
                gone, _ = self._held.popitem(last=False)
                self.used_bytes -= self._sizes[gone]
                dropped.append(gone)
        return dropped

    def fill(self, probabilities: Sequence[float], resident: Iterable[int]) -> None:
        """The most probable experts that are in no pool, as many as there is room."""
        left, taken = self.budget_bytes, set(resident)
        chosen = []
        for expert in np.argsort(-np.asarray(probabilities), kind="stable").tolist():
            if expert not in taken and self._sizes[expert] <= left:
                chosen.append(expert)
                left -= self._sizes[expert]
        self.keep(reversed(chosen))  # the most probable one as if it had come last
