"""Replays a route trace through a cache policy: hit ratios without a model.

The cache is the engine's own `SlotCache`, so semantics are the engine's: a step's
experts of a layer are looked up together, hits are refreshed, then misses are
inserted; experts of the running step are never victims. A layer with fewer slots than
chosen experts passes through them in waves; what was there at the lookup is a hit, all
else a miss.
"""

import dataclasses

import numpy as np

from moe_edge.offload.policy import EvictionPolicy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.simulate.replay.lookups import cache_spec, check_holds, lookups
from moe_edge.workload.traces import DECODE, Trace


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Lookups of distinct experts: one a step and layer, however many tokens chose it.

    Attributes:
      policy: its name.
      hits_L: int [L], found by decode lookups.
      misses_L: int [L], not found.
      prefill_hits, prefill_misses: the same over all prefill lookups.
    """

    policy: str
    hits_L: np.ndarray
    misses_L: np.ndarray
    prefill_hits: int
    prefill_misses: int

    @property
    def hit_ratio(self) -> float:
        """Share of decode lookups that were hits; nan without decode lookups."""
        return _ratio(self.hits_L.sum(), self.misses_L.sum())

    @property
    def hit_ratio_L(self) -> np.ndarray:
        """The same by layer; nan where a layer has none."""
        return np.array([*map(_ratio, self.hits_L, self.misses_L)])


def _ratio(hits: int, misses: int) -> float:
    return float(hits / (hits + misses)) if hits + misses else float("nan")


def replay(
    trace: Trace,
    policy: EvictionPolicy,
    layer_S: tuple[int, ...],
    warm_by_prefill: bool = True,
) -> ReplayResult:
    """Runs all lookups of a trace through a cache.

    Args:
      trace: what was routed.
      policy: as `lookups.policy_of` builds it.
      layer_S: the layer of each slot, or -1 (`lookups.equal_slots`).
      warm_by_prefill: pass the prefill rows too, token by token; they warm the cache
        and are counted apart. Without it decoding begins with an empty cache.
    Raises:
      ConfigError: the trace lacks what the policy needs.
    """
    check_holds("cache policy", policy.name, policy.needs, trace)
    cache = SlotCache(cache_spec(trace, layer_S), policy)
    hits_2L = np.zeros((2, trace.num_layers), np.int64)
    misses_2L = np.zeros((2, trace.num_layers), np.int64)
    for routed in lookups(trace):
        if routed.phase != DECODE and not warm_by_prefill:
            continue
        if routed.new_sequence:
            cache.new_sequence()
        hits, misses = cache.look_up(
            routed.layer, routed.ids_TK, routed.scores_TE, routed.step
        )
        hits_2L[routed.phase, routed.layer] += len(hits)
        misses_2L[routed.phase, routed.layer] += len(misses)
        admit_all(cache, routed.layer, misses)
    return ReplayResult(
        policy.name,
        hits_2L[DECODE],
        misses_2L[DECODE],
        int(hits_2L[1 - DECODE].sum()),
        int(misses_2L[1 - DECODE].sum()),
    )


def admit_all(cache: SlotCache, layer: int, misses: np.ndarray, protected_S=None):
    """Inserts the misses of the running lookup, in waves if the slots are too few."""
    for expert in misses.tolist():
        if cache.admit(layer, expert, protected_S) is None:
            cache.release()  # the wave before is computed
            cache.admit(layer, expert, protected_S)
