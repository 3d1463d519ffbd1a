"""What a calibration recorded, and its replay under other options."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.assist_base import AssistCosts, get_assist
from moe_edge.offload.budget import parse_budget, slots_for
from moe_edge.offload.computed_visit import OnHost
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.offload.slot_plan import plan_of, plan_slots
from moe_edge.planner.costs import ModelCosts, assist_key
from moe_edge.route.base import get_route
from moe_edge.simulate.replay.lookups import check_holds
from moe_edge.simulate.replay.recorded import (
    Predicted,
    Replayed,
    rerouted,
    with_prompts,
)
from moe_edge.simulate.replay.timed import TimedResult, replay_time
from moe_edge.workload.traces import DECODE, PREFILL, Trace, ordered_trace


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A decode trace, and what predictors said in it.

    Attributes:
      trace: of prompts and decoding; batches follow each other.
      predicted: by predictor, after each decode lookup.
      temperature: of the decoded tokens; None: of a trace that does not say.
    """

    trace: Trace
    predicted: Mapping[str, Predicted]
    temperature: float | None = None

    def with_predictions(self, name: str, predicted: Predicted) -> "Recorded":
        return dataclasses.replace(self, predicted={**self.predicted, name: predicted})

    @property
    def batch_T(self) -> np.ndarray:
        """int [T], of each row the batch of prompts that it belongs to."""
        phase = self.trace.phase
        begins = np.r_[False, (phase[1:] == PREFILL) & (phase[:-1] == DECODE)]
        return np.cumsum(begins)

    @property
    def decode_steps(self) -> np.ndarray:
        trace = self.trace
        return np.unique(trace.step[trace.phase == DECODE])

    def by_batch(self, step_s: np.ndarray) -> np.ndarray:
        """float64 [batches]: the mean over the decode steps of each.

        Args:
          step_s: of every decode step, in order.
        """
        decode_T = self.trace.phase == DECODE
        _, at = np.unique(self.trace.step[decode_T], return_index=True)
        batch_N = self.batch_T[decode_T][at]
        counts = np.bincount(batch_N)
        sums = np.bincount(batch_N, weights=step_s)
        return sums[counts > 0] / counts[counts > 0]

    def in_batches(self, batch: int) -> "Recorded":
        """Its sequences decoded together, so many at a time; predictions are left out.

        Raises:
          ConfigError: fewer sequences, or some that were decoded together already.
        """
        trace = self.trace
        decode_T = trace.phase == DECODE
        _, rows = np.unique(
            np.stack([trace.step, trace.layer])[:, decode_T], axis=1, return_counts=True
        )
        if int(rows.max()) == batch:
            return self
        batch_T = self.batch_T
        count = int(batch_T[-1]) + 1
        if int(rows.max()) > 1 or count < batch:
            raise ConfigError(
                f"the trace has {count} batches of {int(rows.max())} rows, the plan is "
                f"for a batch of {batch}; record as many, or at least {batch} "
                "prompts one by one (moe-edge generate --batch_size)"
            )
        place_T = np.zeros(len(trace.step), np.int64)  # of a token in its sequence
        for one in range(count):
            mine_T = batch_T == one
            place_T[mine_T] = np.unique(trace.step[mine_T], return_inverse=True)[1]
        prompts = np.array(
            [
                place_T[(batch_T == one) & ~decode_T].max(initial=-1) + 1
                for one in range(count)
            ]
        )
        longest = int(prompts.max())
        # Decoding begins together.
        place_T = np.where(decode_T, place_T - prompts[batch_T] + longest, place_T)
        keep_T = batch_T // batch < count // batch
        key_T = batch_T // batch * (int(place_T.max()) + 1) + place_T
        arrays = {
            "request": batch_T % batch,
            "phase": trace.phase,
            "step": np.unique(key_T, return_inverse=True)[1],
            "layer": trace.layer,
            "ids_TK": trace.ids_TK,
            "weights_TK": trace.weights_TK,
            "scores_TE": trace.scores_TE,
        }
        kept = {
            name: None if array is None else array[keep_T].astype(array.dtype)
            for name, array in arrays.items()
        }
        for name in ("request", "step"):
            kept[name] = kept[name].astype(np.int32)
        together = ordered_trace(trace.num_experts, trace.top_k, **kept)
        return Recorded(together, {}, self.temperature)

    def first(self, batches: int) -> "Recorded":
        """Its first batches."""
        keep_T = self.batch_T < batches
        if keep_T.all():
            return self
        arrays = {
            field.name: getattr(self.trace, field.name)
            for field in dataclasses.fields(Trace)[2:]
        }
        kept = {n: None if a is None else a[keep_T] for n, a in arrays.items()}
        trace = Trace(self.trace.num_experts, self.trace.top_k, **kept)
        count = _decode_lookups(trace)
        predicted = {name: found[:count] for name, found in self.predicted.items()}
        return Recorded(trace, predicted, self.temperature)

    def at_k(self, k: int | None) -> "Recorded":
        """With the best k experts of each token alone."""
        if k is None or k >= self.trace.top_k:
            return self
        cut = {
            name: array[:, :k]
            for name in ("ids_TK", "weights_TK", "hit_TK", "bytes_TK", "wait_s_TK")
            if (array := getattr(self.trace, name)) is not None
        }
        trace = dataclasses.replace(self.trace, top_k=k, **cut)
        return dataclasses.replace(self, trace=trace)

    def prompt_blocks(self, layer_S: tuple[int, ...]) -> float:
        """Blocks that a batch's prompts bring, at least: distinct ones less slots."""
        trace, share = self.trace, len(layer_S) / self._all_blocks
        prompt_T = trace.phase == PREFILL
        batch_T, E = self.batch_T[prompt_T], trace.num_experts
        keys_TK = (batch_T * trace.num_layers + trace.layer[prompt_T])[:, None] * E
        ids_TK = trace.ids_TK[prompt_T]
        distinct = len(np.unique((keys_TK + ids_TK)[ids_TK >= 0]))
        return distinct / (self.batch_T[-1] + 1) * max(0.0, 1 - share)

    @property
    def _all_blocks(self) -> int:
        return len(np.unique(self.trace.layer)) * self.trace.num_experts


def _decode_lookups(trace: Trace) -> int:
    return int((trace.phase[trace.bounds[:-1]] == DECODE).sum())


def layer_slots(options: OffloadOptions, live) -> tuple[int, ...]:
    """layer_S as the engine plans it.

    Args:
      live: has `config`, `block_bytes`, `needs(options)` and `context(options)`.
    Raises:
      CapacityError: fewer slots than the slot plan can share out.
    """
    config, needs = live.config, live.needs(options)
    E, layers = config.moe.num_experts, config.moe_layers
    total = slots_for(
        parse_budget(options.device_memory),
        live.block_bytes,
        len(layers) * E,
        needs.other_bytes,
        machine_bytes=live.machine_bytes,
        least_slots=needs.least_slots,
        others=str(needs),
    )
    name = options.slot_plan
    given = live.context(options).fill(plan_of(name), options.slot_plan_options)
    return plan_slots(name, total, config.num_layers, E, layers, **given)


def play(
    recorded: Recorded,
    options: OffloadOptions,
    live,
    costs: ModelCosts,
    prompts: int | None = None,
) -> TimedResult:
    """Replays what was recorded with a calibration's costs, but for what a transferred
    block costs the host.

    Args:
      live: the checkpoint, see `layer_slots`.
      prompts: that are replayed, from the first; None: all.
    Raises:
      ConfigError: a predictor whose predictions were not recorded.
    """
    if prompts is not None:
        recorded = recorded.first(-(-prompts // live.batch))
    trace, name = recorded.trace, predictor_name(options)
    predictor = None
    if name != "none":
        if name not in recorded.predicted:
            raise ConfigError(
                f"what predictor {name} says was not recorded; leave --trace out, or "
                "raise --calibrate_s"
            )
        predictor = Replayed(with_prompts(trace, recorded.predicted[name]))
    given = options.eviction, options.eviction_options
    policy = EVICTIONS.make(*given, live.context(options))
    check_holds(EVICTIONS.kind, policy.name, policy.needs, trace)
    link, layers = costs.link(options), len(live.config.moe_layers)
    route = get_route(options.route, **options.route_options)
    reroute = None
    if not route.lossless:
        check_holds("route", route.name, frozenset({"scores"}), trace)
        reroute = rerouted(route, live.config.moe)
    return replay_time(
        trace,
        policy,
        layer_slots(options, live),
        costs.step_costs(name, link, live.block_bytes, layers),
        predictor,
        options.horizon,
        options.prefetch_limit,
        reroute,
        whole=True,
        on_host=_on_host(options, costs),
    )


def _on_host(options: OffloadOptions, costs: ModelCosts) -> OnHost | None:
    """What the assist of options computes, by the costs that its calibration saw."""
    if options.assist is None:
        return None
    assist = get_assist(options.assist, **options.assist_options)
    seen = AssistCosts(*costs.assist_s[assist_key(options)][3:])
    return lambda absent, ids_TK: list(assist.take(absent, ids_TK, seen))


def predictor_name(options: OffloadOptions) -> str:
    """Of a name, a class or an object."""
    given = options.predictor
    return given if isinstance(given, str) else given.name
