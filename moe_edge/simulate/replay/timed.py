"""Replays a route trace with a cost model: what time per token to expect.

The layered engine's own `LayerStep` runs over a queue in computed time; a layer's
experts are computed when all of them have arrived. One compute resource and one link,
both serial. Decode steps only: prefill rows warm cache and predictor without taking
time. Between two sequences the link comes to rest, as in the engine; no step is charged
for that.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_from_zero,
    check_positive,
    check_shape,
)
from moe_edge.offload.block_queue import BlockQueue, TransferStats
from moe_edge.offload.computed_carrier import ComputedCarrier
from moe_edge.offload.computed_visit import OnHost, pass_layer
from moe_edge.offload.evict_base import Eviction
from moe_edge.offload.layer_step import LayerStep
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.offload.statistics import Counters
from moe_edge.predict.base import Predictor
from moe_edge.simulate.replay.hits import pass_cache, pass_prompt
from moe_edge.simulate.replay.lookups import (
    RoutedLayer,
    cache_spec,
    check_horizon,
    lookups,
    whole_prompts,
)
from moe_edge.workload.traces import DECODE, Trace

Reroute = Callable[[RoutedLayer, np.ndarray], np.ndarray]  # -> ids_TK


@dataclasses.dataclass(frozen=True, eq=False)
class CostModel:
    """What a decode step costs, measured or assumed.

    Attributes:
      route_s: seconds until a layer's routing is known (attention, router, read-back);
        one number, or one a layer of the model.
      experts_s: seconds of its experts once they are there; likewise.
      step_s: seconds a step outside the layers (embedding, head, sampling).
      block_bytes: of one expert block.
      link: rate and latency.
    """

    route_s: float | Sequence[float]
    experts_s: float | Sequence[float]
    block_bytes: int
    link: EmulatedLink
    step_s: float = 0.0

    def __post_init__(self):
        check_positive("block_bytes", self.block_bytes)
        for name in ("route_s", "experts_s", "step_s"):
            for seconds in np.ravel(getattr(self, name)):
                check_from_zero(name, seconds)

    def layers(self, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """route_s and experts_s as float64 [L].

        Raises:
          ConfigError: as many numbers as another model has layers.
        """
        both = [np.asarray(s, np.float64) for s in (self.route_s, self.experts_s)]
        for name, seconds in zip(("route_s", "experts_s"), both, strict=True):
            if seconds.ndim:
                check_shape(name, seconds, (num_layers,))
        return tuple(np.broadcast_to(seconds, (num_layers,)) for seconds in both)


@dataclasses.dataclass(frozen=True)
class TimedResult:
    """What the decode steps of a trace would take.

    Attributes:
      step_s: float64 [steps], duration of each.
      resident_s: a step's compute, that is its duration if nothing had to move.
      counters: of lookups, and seconds that compute stood still.
      moved: by the cause with which a transfer began.
      host_s: processor seconds of the decode lookups, of this replay itself: what
        policies and their bookkeeping cost.
      absent: int64 [steps, 2]: layers of each step in which experts were absent, and
        how many these were.
    """

    step_s: np.ndarray
    resident_s: float
    counters: Counters
    moved: TransferStats
    host_s: float = 0.0
    absent: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def tpot_s(self) -> float:
        """Mean time per output token (of a batch: per step)."""
        return float(self.step_s.mean())

    @property
    def misses(self) -> int:
        """Experts that were neither there nor on their way when they were looked up."""
        return self.counters.misses - self.counters.late


def replay_time(
    trace: Trace,
    policy: Eviction,
    layer_S: tuple[int, ...],
    costs: CostModel,
    predictor: Predictor | None = None,
    horizon: int = 1,
    prefetch_limit: int = 8,
    reroute: Reroute | None = None,
    whole: bool = False,
    on_host: OnHost | None = None,
) -> TimedResult:
    """Predicts the time of every decode step of a trace.

    Args:
      policy: as `lookups.policy_of` builds it.
      layer_S: the layer of each slot, or -1 (`lookups.equal_slots`).
      predictor: says what to prefetch after a layer is routed; None: no prefetching.
      horizon: layers to look ahead.
      prefetch_limit: most prefetches asked for after one lookup.
      reroute: of a lossy route: chooses of a decode lookup by what is resident. The
        scores of later layers stay those of the trace, which no route had changed.
      whole: prompts pass the cache layer by layer, all their tokens in one lookup, as
        in an engine whose chunks hold them; else token by token.
      on_host: of a CPU assist: which absent experts it computes. They do not travel;
        the time that it takes is left out.
    Raises:
      ConfigError: the trace has no decode step, or a bad horizon.
    """
    predictor = Predictor() if predictor is None else predictor
    check_horizon(horizon, trace)
    if not (trace.phase == DECODE).any():
        raise ConfigError("the trace has no decode step (phase 1): nothing to time")
    route_L, experts_L = costs.layers(trace.num_layers)
    carrier = ComputedCarrier(costs.link, costs.block_bytes, trace.num_experts)
    queue = BlockQueue([carrier])
    cache = SlotCache(cache_spec(trace, layer_S), policy)
    layer_step = LayerStep(
        cache,
        queue,
        predictor=predictor,
        horizon=horizon,
        prefetch_limit=prefetch_limit,
    )
    residency = layer_step.residency
    step, starts, ends, prompt, host_s = None, [], [], [], 0.0
    absent: list[list[int]] = []
    for routed in lookups(trace):
        layer = routed.layer
        if routed.new_sequence:
            queue.poll()
            layer_step.drain()
            layer_step.finish_sequences()
        if routed.phase != DECODE:
            if not whole:
                pass_cache(cache, routed)
            prompt.append(routed)
            continue
        for each in whole_prompts(prompt, trace.num_experts):
            if whole:
                pass_prompt(cache, each)
            each.show(layer_step.predictor_run)
        prompt.clear()
        if routed.step != step:
            starts.append(carrier.now_s)
            ends.append(carrier.now_s)
            absent.append([0, 0])
            carrier.now_s += costs.step_s
            step = routed.step
        carrier.now_s += route_L[layer]
        seen = routed.ids_TK, routed.scores_TE
        begun_s = time.process_time()
        if reroute is not None:
            queue.poll()
            seen = reroute(routed, residency.arrived(layer)), routed.scores_TE
        visit = pass_layer(layer_step, layer, *seen, step, routed.sequences, on_host)
        host_s += time.process_time() - begun_s
        absent[-1][0] += bool(visit.misses)
        absent[-1][1] += len(visit.misses)
        carrier.now_s += experts_L[layer]
        ends[-1] = carrier.now_s
    compute_L = (route_L + experts_L)[np.unique(trace.layer)]
    return TimedResult(
        step_s=np.subtract(ends, starts),
        resident_s=float(costs.step_s + compute_L.sum()),
        counters=layer_step.counters[True],
        moved=queue.stats(),
        host_s=host_s,
        absent=np.array(absent, np.int64),
    )
