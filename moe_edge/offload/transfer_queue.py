"""The queue of expert blocks from the store to the device's slots, in real time."""

from collections.abc import Sequence

import numpy as np

from moe_edge.offload.block_queue import BlockQueue
from moe_edge.offload.home_slots import HomeSlots
from moe_edge.offload.real_carrier import RealCarrier


class TransferQueue(BlockQueue):
    """Fills an engine's slots; a context manager, which closes it.

    Args:
      carriers: as in `BlockQueue`.
      slots: of all homes, of several; None: the only carrier's.
    """

    def __init__(
        self,
        carriers: Sequence[RealCarrier],
        slots: HomeSlots | None = None,
        home_S: np.ndarray | None = None,
    ):
        self.store = carriers[0].store
        self.slots = carriers[0].slots if slots is None else slots
        super().__init__(carriers, self.slots.num_slots, home_S)

    def __enter__(self) -> "TransferQueue":
        return self

    def __exit__(self, *_) -> None:
        self.close()
