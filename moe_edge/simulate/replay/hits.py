"""Replays a route trace through a cache policy: hit ratios without a model.

The cache is the engine's own `SlotCache`, so semantics are the engine's: a step's
experts of a layer are looked up together, hits are refreshed, then misses are
inserted; experts of the running step are never victims. A layer with fewer slots than
chosen experts passes through them in waves, in the order of the engine's decoding; the
law is that of `offload/statistics.py`.
"""

import dataclasses

import numpy as np

from moe_edge.offload.evict_base import Eviction
from moe_edge.offload.slot_cache import MAX_GROUP, SlotCache
from moe_edge.simulate.replay.lookups import RoutedLayer, cache_spec, lookups
from moe_edge.workload.traces import DECODE, Trace


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Lookups of distinct experts: one a step and layer, however many tokens chose it.

    Attributes:
      policy: its name.
      hits_L: int [L], experts of decode lookups that needed no transfer.
      misses_L: int [L], transfers.
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


def replay(trace: Trace, policy: Eviction, layer_S: tuple[int, ...]) -> ReplayResult:
    """Runs all lookups of a trace through a cache.

    Those of prompts pass token by token; they warm the cache and are counted apart.

    Args:
      policy: as `lookups.policy_of` builds it.
      layer_S: the layer of each slot, or -1 (`lookups.equal_slots`).
    """
    cache = SlotCache(cache_spec(trace, layer_S), policy)
    hits_2L = np.zeros((2, trace.num_layers), np.int64)
    misses_2L = np.zeros((2, trace.num_layers), np.int64)
    for routed in lookups(trace):
        if routed.new_sequence:
            cache.finish_sequences()
        hits, misses = pass_cache(cache, routed)
        hits_2L[routed.phase, routed.layer] += hits
        misses_2L[routed.phase, routed.layer] += misses
    return ReplayResult(
        policy.name,
        hits_2L[DECODE],
        misses_2L[DECODE],
        int(hits_2L[1 - DECODE].sum()),
        int(misses_2L[1 - DECODE].sum()),
    )


def pass_prompt(cache: SlotCache, routed: RoutedLayer) -> None:
    """A prompt's lookup of a layer, in the order of the engine's prefill: the experts
    that are here first, then the others in groups, each beside the one before."""
    layer, ids_TK = routed.layer, routed.ids_TK
    hits, misses = cache.look_up(layer, ids_TK, routed.scores_TE, routed.step)
    room = cache.room_L[layer]
    if len(hits) + len(misses) <= room:
        for expert in misses:
            cache.admit(layer, expert)
        return
    row = cache.rows[layer]
    size = max(1, min(MAX_GROUP, room // 2))
    busy = [row[expert] for expert in hits]
    while misses:
        cache.release()
        group = []
        for expert in misses[:size]:
            slot = cache.admit(layer, expert, [*busy, *group])
            if slot is None:
                break
            group.append(slot)
        misses, busy = misses[len(group) :], group


def pass_cache(cache: SlotCache, routed: RoutedLayer) -> tuple[int, int]:
    """A lookup whose misses are in their slots at once: (hits, misses)."""
    layer, ids_TK = routed.layer, routed.ids_TK
    hits, misses = cache.look_up(layer, ids_TK, routed.scores_TE, routed.step)
    if len(hits) + len(misses) <= cache.room_L[layer]:
        for expert in misses:
            cache.admit(layer, expert)
        return len(hits), len(misses)
    fetched = []
    for _, _, absent, here in cache.runs(layer, ids_TK):
        kept = {*here}
        for expert in absent:
            kept.add(cache.admit(layer, expert, kept))
        fetched += absent
    return len({*hits, *misses}.difference(fetched)), len(fetched)
