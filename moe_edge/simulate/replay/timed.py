"""Replays a route trace with a cost model: what time per token to expect.

The layered engine's own `OffloadManager` runs over a queue in computed time, in the
order of `offload/layer_visit.py`; a layer's experts are computed when all of them have
arrived. One compute resource and one link, both serial. Decode
steps only: prefill rows warm cache and predictor without taking time. Between two
sequences the link comes to rest, as in the engine; no step is charged for that.
"""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.offload.manager import OffloadManager
from moe_edge.offload.policy import EvictionPolicy
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.virtual_queue import VirtualQueue
from moe_edge.predict.base import Predictor
from moe_edge.simulate.replay.hits import pass_cache
from moe_edge.simulate.replay.lookups import (
    cache_spec,
    check_holds,
    check_horizon,
    lookups,
)
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
    queue = VirtualQueue(costs.link, costs.block_bytes, trace.num_experts)
    manager = OffloadManager(
        SlotCache(cache_spec(trace, layer_S), policy),
        queue,
        predictor=predictor,
        horizon=horizon,
        prefetch_limit=prefetch_limit,
    )
    step, starts, ends = None, [], []
    for routed in lookups(trace):
        layer = routed.layer
        if routed.new_sequence:
            queue.poll()
            manager.drain()
            manager.finish_sequences()
        if routed.phase != DECODE:
            pass_cache(manager.cache, routed)
            manager.predictor_run.observe(layer, routed.ids_TK, routed.scores_TE)
            continue
        if routed.step != step:
            starts.append(queue.now_s)
            ends.append(queue.now_s)
            queue.now_s += costs.step_s
            step = routed.step
        queue.now_s += route_L[layer]
        manager.pass_layer(layer, routed.ids_TK, routed.scores_TE, step)
        queue.now_s += experts_L[layer]
        ends[-1] = queue.now_s
    counters, moved = manager.counters[True], queue.stats()
    compute_L = (route_L + experts_L)[np.unique(trace.layer)]
    return TimedResult(
        step_s=np.subtract(ends, starts),
        hits=counters.hits,
        late=counters.late,
        misses=counters.misses - counters.late,
        demand_bytes=moved.demand.bytes,
        prefetch_bytes=moved.prefetch.bytes,
        wasted_bytes=moved.wasted_bytes,
        unused_bytes=moved.unused_bytes,
        cancelled=moved.cancelled,
        wait_s=counters.wait_s,
        resident_s=float(costs.step_s + compute_L.sum()),
        link_s=(moved.demand.count + moved.prefetch.count) * queue.transfer_s,
    )
