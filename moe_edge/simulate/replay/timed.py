"""Replays a route trace with a cost model: what time per token to expect.

The layered engine's own `OffloadManager` runs over a queue in computed time: when a
layer's routing is known, queued prefetches for it that were wrong are taken back, its
misses are requested, then prefetches for the layers ahead; its experts are computed
when all of them have arrived. One compute resource and one link, both serial. Decode
steps only: prefill rows warm cache and predictor without taking time.
"""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import EvictionPolicy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.predict.base import Predictor
from moe_edge.simulate.replay.hits import admit_all
from moe_edge.simulate.replay.lookups import (
    RoutedLayer,
    cache_spec,
    check_holds,
    check_horizon,
    lookups,
)
from moe_edge.simulate.replay.serial_link import ComputedQueue
from moe_edge.simulate.replay.timing import CostModel, TimedResult
from moe_edge.workload.traces import DECODE, Trace


def replay_time(
    trace: Trace,
    policy: EvictionPolicy,
    layer_S: tuple[int, ...],
    costs: CostModel,
    predictor: Predictor | None = None,
    horizon: int = 1,
    prefetch_limit: int = 8,
) -> TimedResult:
    """Predicts the time of every decode step of a trace.

    Args:
      trace: what was routed.
      policy: as `lookups.policy_of` builds it.
      layer_S: the layer of each slot, or -1 (`lookups.equal_slots`).
      costs: of compute and link.
      predictor: says what to prefetch after a layer is routed; None: no prefetching.
      horizon: layers to look ahead.
      prefetch_limit: most prefetches asked for after one lookup.
    Raises:
      ConfigError: the trace has no decode step or lacks what policy or predictor need.
    """
    predictor = Predictor() if predictor is None else predictor
    check_holds("cache policy", policy.name, policy.needs, trace)
    check_holds("predictor", predictor.name, predictor.needs, trace)
    check_horizon(horizon, trace)
    if not (trace.phase == DECODE).any():
        raise ConfigError("the trace has no decode step (phase 1): nothing to time")
    route_L, experts_L = costs.layers(trace.num_layers)
    queue = ComputedQueue(costs.link, costs.block_bytes, trace.num_experts)
    manager = OffloadManager(
        SlotCache(cache_spec(trace, layer_S), policy),
        queue,
        predictor=predictor,
        horizon=horizon,
        prefetch_limit=prefetch_limit,
    )
    step, starts = None, []
    for routed in lookups(trace):
        layer, ids_TK, scores_TE = routed.layer, routed.ids_TK, routed.scores_TE
        if routed.new_sequence:
            manager.new_sequence()
        if routed.phase != DECODE:
            found = manager.cache.look_up(layer, ids_TK, scores_TE, routed.step)
            admit_all(manager.cache, layer, found.misses)
            manager.predictor_run.observe(layer, ids_TK, scores_TE)
            continue
        if routed.step != step:
            starts.append(queue.now_s)
            queue.now_s += costs.step_s
            step = routed.step
        queue.now_s += route_L[layer]
        _run_layer(manager, routed)
        queue.now_s += experts_L[layer]
    counters = manager.counters[True]
    compute_L = (route_L + experts_L)[np.unique(trace.layer)]
    return TimedResult(
        step_s=np.diff([*starts, queue.now_s]),
        hits=counters.hits,
        late=counters.late,
        misses=counters.misses - counters.late,
        demand_bytes=queue.begun["demand"] * costs.block_bytes,
        prefetch_bytes=queue.begun["prefetch"] * costs.block_bytes,
        wasted_bytes=queue.wasted * costs.block_bytes,
        unused_bytes=queue.unused_blocks() * costs.block_bytes,
        cancelled=queue.cancelled,
        wait_s=counters.wait_s,
        resident_s=float(costs.step_s + compute_L.sum()),
        link_s=sum(queue.begun.values()) * queue.transfer_s,
    )


def _run_layer(manager: OffloadManager, routed: RoutedLayer) -> None:
    """From the known routing to the arrival of the layer's last block."""
    layer, step = routed.layer, routed.step
    manager.queue.poll()
    hits, misses = manager.look_up(layer, routed.ids_TK, routed.scores_TE, step)
    transfers = manager.arriving(layer, hits)
    left = misses.tolist()
    while left:
        got = manager.fetch(layer, left, step)
        transfers, left = transfers + got, left[len(got) :]
        if left:  # a wave: its blocks come and are computed, then the next one
            manager.wait(transfers, layer, step)
            manager.cache.release()
            transfers = []
            if not got:  # every slot awaits a prefetch
                manager.drain()
    manager.predictor_run.observe(layer, routed.ids_TK, routed.scores_TE)
    manager.prefetch(layer, step)
    manager.wait(transfers, layer, step)
