"""Hits, misses and bytes of a fused run, told apart without waiting for the device.

The counters are part of the donated state, so what is needed of them later is copied;
they are read on the host only when somebody asks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_copy = jax.jit(jnp.copy)
_add_change = jax.jit(lambda sum_L3, now_L3, before_L3: sum_L3 + (now_L3 - before_L3))


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the cache did, distinct experts per layer, int64 `[L]` each."""

    hits_L: np.ndarray
    misses_L: np.ndarray
    evictions_L: np.ndarray
    bytes_L: np.ndarray  # moved from the host to the device


class Counting:
    """Splits the running counters int32 `[L, 3]` (hits, misses, evictions) by phase.

    Args:
      counts_L3: the counters now.
      record_bytes: what a miss moves.
    """

    def __init__(self, counts_L3: jax.Array, record_bytes: int):
        self._record_bytes = record_bytes
        self.reset(counts_L3)

    def reset(self, counts_L3: jax.Array) -> None:
        """Counts from here on, as after a warm-up."""
        self._start_L3 = _copy(counts_L3)
        self._prefill_L3 = jnp.zeros_like(counts_L3)

    def begin_prefill(self, counts_L3: jax.Array) -> None:
        self._before_L3 = _copy(counts_L3)

    def end_prefill(self, counts_L3: jax.Array) -> None:
        self._prefill_L3 = _add_change(self._prefill_L3, counts_L3, self._before_L3)

    def total(self, counts_L3: jax.Array) -> Counts:
        """Everything counted since the cache was cleared."""
        counts_3L = np.array(counts_L3, np.int64).T
        return Counts(*counts_3L, bytes_L=counts_3L[1] * self._record_bytes)

    def movement(self, counts_L3: jax.Array) -> dict:
        """`hit_ratio` of decoding and `bytes_moved`, since the last reset."""
        done_L3 = np.array(counts_L3) - np.array(self._start_L3)
        hits, misses, _ = (done_L3 - np.array(self._prefill_L3)).sum(axis=0).tolist()
        ratio = hits / (hits + misses) if hits + misses else None
        moved = int(done_L3[:, 1].sum()) * self._record_bytes
        return {"hit_ratio": ratio, "bytes_moved": moved}
