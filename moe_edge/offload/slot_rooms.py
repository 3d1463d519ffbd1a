"""Which slots may hold which blocks, and how many experts of a layer fit at once.

Nothing of it changes while a cache runs.
"""

from collections.abc import Sequence

import numpy as np

from moe_edge.offload.evict_base import CacheSpec
from moe_edge.offload.homes import Homes


class SlotRooms:
    """The slots of `spec` by layer, and by home where experts have fixed ones.

    room_L: by layer, how many slots may hold blocks of it.
    """

    def __init__(self, spec: CacheSpec, homes: Homes | None = None):
        self.spec, self.homes = spec, homes
        self._fixed = homes if homes is not None and homes.is_fixed else None
        self._layer_S = np.asarray(spec.layer_S, np.int32)
        self.room_L = [
            int(self.slots_of(layer).sum()) for layer in range(spec.num_layers)
        ]
        # Layers that share all slots share one array.
        parts: dict[bytes, np.ndarray] = {}
        self._slots_L = []
        for layer in range(spec.num_layers):
            slots = np.flatnonzero(self.slots_of(layer))
            self._slots_L.append(parts.setdefault(slots.tobytes(), slots))

    def rooms(self, layer: int) -> list[int]:
        """How many slots may hold blocks of the layer, at each home if it is fixed."""
        if self._fixed is None:
            return [self.room_L[layer]]
        home_S = self._fixed.home_S[self._slots_L[layer]]
        return np.bincount(home_S, minlength=len(self._fixed)).tolist()

    def by_home(self, layer: int, experts: Sequence[int]) -> list[Sequence[int]]:
        """Experts of a layer as `rooms` counts slots, in their order."""
        if self._fixed is None:
            return [experts]
        return self._fixed.split(layer, experts)

    def room_of(self, layer: int, expert: int) -> int:
        """Which of `rooms` is the expert's."""
        return 0 if self._fixed is None else int(self._fixed.home_LE[layer, expert])

    def surely_fits(self, layer: int, count: int) -> bool:
        """Whether slots hold any so many experts at once."""
        parts = self.by_home(layer, range(self.spec.num_experts))
        rooms = zip(parts, self.rooms(layer), strict=True)
        return all(min(count, len(part)) <= room for part, room in rooms)

    def slots_of(self, layer: int) -> np.ndarray:
        """bool [S]: the slots that may hold blocks of this layer."""
        return (self._layer_S == layer) | (self._layer_S == -1)
