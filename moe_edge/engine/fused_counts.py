"""What a fused engine's cache did, by phase, read from its running counters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.expert_state import ExpertState, Moved
from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.kernels.lookup_programs import MISSES

_copy = jax.jit(jnp.copy)
_add_change = jax.jit(lambda sum_L3, now_L3, before_L3: sum_L3 + (now_L3 - before_L3))


class Counts(NamedTuple):
    """What the cache did, distinct experts per layer, int64 `[L]` each."""

    hits_L: np.ndarray
    misses_L: np.ndarray
    evictions_L: np.ndarray


class Counting:
    """Splits the running counters of a `Cache` by phase, without a wait.

    They are part of the donated state, so what is needed of them later is copied; they
    are read on the host only when somebody asks, and may pass the end of int32 between
    two such times once.

    Args:
      device: whose cache it is.
    """

    def __init__(self, cache: Cache, record_bytes: int, device: DeviceCache):
        self._record_bytes, self._device = record_bytes, device
        self.reset(cache)

    def reset(self, cache: Cache) -> None:
        """Counts from here on, as after a warm-up."""
        self._last = {name: _copy(array) for name, array in running(cache).items()}
        if cache.ahead_2 is not None:
            self._unused = self._count_unused(cache)
        self._done = {
            name: np.zeros(array.shape, np.int64) for name, array in self._last.items()
        }
        self._prefill_L3 = jnp.zeros_like(cache.counts_L3)

    def begin_prefill(self, counts_L3: jax.Array) -> None:
        self._before_L3 = _copy(counts_L3)

    def end_prefill(self, counts_L3: jax.Array) -> None:
        self._prefill_L3 = _add_change(self._prefill_L3, counts_L3, self._before_L3)

    def _read(self, cache: Cache) -> dict[str, np.ndarray]:
        """`running` since the last reset, int64."""
        now = {name: np.array(array) for name, array in running(cache).items()}
        for name, done in self._done.items():
            done += now[name] - np.array(self._last[name])
        self._last = now
        return self._done

    def phases(self, cache: Cache) -> dict[bool, np.ndarray]:
        """Counts `[L, 3]` since the last reset, by whether it was decoding."""
        prefill_L3 = np.array(self._prefill_L3, np.int64)
        counts_L3 = self._read(cache)["counts_L3"]
        return {True: counts_L3 - prefill_L3, False: prefill_L3}

    def movement(self, cache: Cache) -> dict:
        """`hit_ratio` of decoding and `bytes_moved`, since the last reset."""
        hits, misses, _ = self.phases(cache)[True].sum(axis=0).tolist()
        ratio = hits / (hits + misses) if hits + misses else None
        return {"hit_ratio": ratio, "bytes_moved": self.moved(cache).bytes}

    def moved(self, cache: Cache) -> Moved:
        """As of `Engine.moved`."""
        done = self._read(cache)
        misses, helped = int(done["counts_L3"][:, MISSES].sum()), self.helped(cache)
        moved_bytes = (misses - helped) * self._record_bytes
        routed, changed = done["choices_2"].tolist()
        ahead_bytes = wasted_bytes = 0
        if "ahead_2" in done:
            fetched, used = done["ahead_2"].tolist()
            unused = int(self._count_unused(cache)) - int(self._unused)
            ahead_bytes = fetched * self._record_bytes
            wasted_bytes = (fetched - used - unused) * self._record_bytes
        return Moved(moved_bytes, ahead_bytes, wasted_bytes, routed, changed)

    def expert_state(self, cache: Cache) -> ExpertState:
        """As of `Engine.expert_state`."""
        slot_LE = np.array(cache.slot_N)[:-1].reshape(self._device.spec.num_layers, -1)
        phases = self.phases(cache).items()
        lookups_L2 = {phase: counts_L3[:, :2] for phase, counts_L3 in phases}
        capacity_L, moved = list(self._device.capacity_L), self.moved(cache)[:3]
        return ExpertState("fused", capacity_L, slot_LE >= 0, lookups_L2, *moved)

    def helped(self, cache: Cache) -> int:
        """Experts that the host computed."""
        return int(self._read(cache).get("helped", 0))

    def _count_unused(self, cache: Cache) -> jax.Array:
        return jnp.sum(self._device.unused_LE(cache))


def running(cache: Cache) -> dict[str, jax.Array]:
    """The counters that steps change."""
    names = "counts_L3", "choices_2", "ahead_2", "helped"
    counters = {name: getattr(cache, name) for name in names}
    return {name: array for name, array in counters.items() if array is not None}
