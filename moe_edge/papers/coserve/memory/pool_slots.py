"""Weights of the resident experts of one executor: device arrays that differ in size.

A slot is the number of an expert, and `Pool` says who is in. So a transfer queue that
carries experts into a pool is told the expert's number twice.
"""

import jax
import numpy as np

from moe_edge.core.checks import check_count

_ALIGNMENT = 64  # bytes; JAX aliases host memory only at this alignment


class PoolSlots:
    """One array a resident expert, written whole and never changed.

    Attributes:
      num_slots: experts that there are, resident or not; device: where the arrays are.
      arrays: expert -> its weights, of the resident ones.
    """

    safe_in_thread = True  # each executor has its own
    max_staged = 1

    def __init__(self, num_slots: int, device: jax.Device):
        check_count("number of slots", num_slots)
        self.num_slots, self.device = num_slots, device
        self.arrays: dict[int, jax.Array] = {}

    def write(self, slot: int, source_B: np.ndarray | jax.Array) -> None:
        """An expert enters; returns when its weights are on the device.

        Args:
          source_B: in host memory. A NumPy array is copied, as it may be a mapped
            file; what `take` gave is used as it is, where the device is the host.
        """
        if isinstance(source_B, np.ndarray) and self.device.platform == "cpu":
            source_B = _aligned(source_B)
        array = jax.device_put(source_B, self.device, may_alias=True)
        self.arrays[slot] = array.block_until_ready()

    def take(self, slot: int) -> jax.Array:
        """An expert leaves: its weights."""
        return self.arrays.pop(slot)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def recover(self) -> None:
        """No write can take memory that was there before."""


def to_host(array: jax.Array) -> np.ndarray | jax.Array:
    """Weights in host memory: the array itself if it is there."""
    on_host = next(iter(array.devices())).platform == "cpu"
    return array if on_host else np.asarray(array)


def _aligned(source_B: np.ndarray) -> np.ndarray:
    """A copy that JAX takes as it is."""
    raw = np.empty(source_B.nbytes + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    copy = raw[first : first + source_B.nbytes].view(source_B.dtype)
    np.copyto(copy, source_B)
    return copy
