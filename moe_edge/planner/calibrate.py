"""Measures what a plan asks of this machine for one checkpoint, in bounded time.

For each predictor a decode step whose experts are all here, a run with misses over the
fastest link and one over the user's. What these take beyond the replay of their own
lookups is spread over the blocks that were moved. Which experts are chosen and
predicted is recorded on the way: replay then needs no further run.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.core.progress import progress
from moe_edge.engine.device_memory import free_device_bytes
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.sampling import Sampling
from moe_edge.planner.costs import ModelCosts
from moe_edge.planner.live import Live, Run, undisturbed
from moe_edge.planner.replayed import Recorded, layer_slots, play
from moe_edge.simulate.replay.timed import TimedResult

NONE = "none"
FEW = 6  # batches of runs that decide a cost, not a mean over prompts
HIT_ROUNDS = 5
ASSISTED_ROUNDS = 3
ALL_HERE = "100%"
OWN_LINK = {"link_bytes_per_s": None, "link_latency_s": 0.0}


class Calibrated(NamedTuple):
    """Costs, what was recorded, and the predictors for which there was no time."""

    costs: ModelCosts
    recorded: Recorded
    left_out: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a calibration decodes.

    Attributes:
      prompts: token ids, all of one length, a multiple of the batch.
      new_tokens: of each.
      sampling: as the user will.
      limit_s: after which no further predictor is begun.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    sampling: Sampling
    limit_s: float = 90.0


def calibrate(
    live: Live,
    base: OffloadOptions,
    predictors: Mapping[str, OffloadOptions],
    assists: Sequence[str],
    protocol: Protocol,
    recorded: Recorded | None = None,
) -> Calibrated:
    """Measures a checkpoint.

    Args:
      base: the user's budget, slot plan and link; no predictor, least recently used.
      predictors: name -> `base` with it; `none` is measured anyway.
      assists: CPU assists to measure at the user's link.
      recorded: of the same model in another format, whose choices stand for these.
    """
    begun_s = time.perf_counter()
    running, left_out = _Calibration(live, protocol, recorded, base), []

    def has_time(name: str) -> bool:
        if time.perf_counter() - begun_s <= protocol.limit_s:
            return True
        left_out.append(name)
        return False

    running.measure(NONE, predictors.get(NONE, base))
    for name in progress(assists, "assists calibrated"):
        if has_time(name):
            running.measure_assist(name, dataclasses.replace(base, assist=name))
    names = [name for name in predictors if name != NONE]
    for name in progress(names, "predictors calibrated"):
        if has_time(name):
            running.measure(name, predictors[name])
    return Calibrated(running.finished(base), running.recorded, left_out)


class _Calibration:
    """What has been measured so far."""

    def __init__(
        self,
        live: Live,
        protocol: Protocol,
        recorded: Recorded | None,
        base: OffloadOptions,
    ):
        self._live, self._protocol = live, protocol
        self._few = protocol.prompts[: FEW * live.batch]
        self._records = recorded is None
        if recorded is None:
            fast = dataclasses.replace(base, **OWN_LINK)
            run = self._run(fast, protocol.prompts, with_trace=True)
            recorded = Recorded(run.trace, {}, protocol.sampling.temperature)
        self.recorded = recorded
        self._costs = ModelCosts(
            batch=live.batch,
            layered_s=0.0,
            layer_share=0.0,
            per_predictor_s={},
            miss_host_s={},
            copy_s=0.0,
            prefill_s={},
            prefill_block_s=(),
            block_bytes=live.block_bytes,
            dense_bytes=live.dense_bytes,
            noise=0.0,
            temperature=protocol.sampling.temperature,
            steps=len(recorded.decode_steps),
        )
        self._first_s = 0.0  # to the first token, experts here
        self._waiting: list[tuple[float, float]] = []  # a transfer, to the first token
        self._ratios: list[np.ndarray] = []

    def _run(
        self, options: OffloadOptions, prompts, with_trace=False, **how: Any
    ) -> Run:
        protocol = self._protocol
        given = prompts, protocol.new_tokens, protocol.sampling
        with self._live.engine(options, with_trace) as engine:
            return self._live.run(engine, *given, **how)

    def _note(self, **more) -> None:
        self._costs = dataclasses.replace(self._costs, **more)

    def measure(self, name: str, options: OffloadOptions) -> None:
        """A predictor: a step with all experts here, then runs with misses."""
        self._measure_hits(name, options)
        own = dataclasses.replace(options, **OWN_LINK)
        every = self._protocol.prompts if self._records else self._few
        run = self._run(own, every)
        if self._records:
            self.recorded = self.recorded.with_predictions(name, run.log.predicted)
        if name == NONE:
            self._note(copy_s=run.load_s)
        self._measure_misses(name, own, run, len(every))
        if options.link_bytes_per_s is not None:
            run = self._run(options, self._few)
            self._measure_misses(name, options, run, len(self._few))

    def _measure_hits(self, name: str, options: OffloadOptions) -> None:
        here = dataclasses.replace(options, device_memory=ALL_HERE, **OWN_LINK)
        holds_all = _has_room(self._live, here)
        if not holds_all:
            here = dataclasses.replace(options, **OWN_LINK)
        run = self._run(here, self._few, rounds=HIT_ROUNDS, fills=True)
        hit_s = step_s = float(np.median(run.step_s))
        if not holds_all:
            hit_s = _without_waits(run)
        self._note(per_predictor_s={**self._costs.per_predictor_s, name: hit_s})
        if name == NONE:
            layers = len(self._live.config.moe_layers)
            share = min(1.0, run.log.layer_s() * layers / step_s)
            self._note(layered_s=hit_s, layer_share=share)
            self._first_s = float(np.median(run.ttft_s))

    def _measure_misses(
        self, name: str, options: OffloadOptions, run: Run, prompts: int
    ) -> None:
        """Spreads what a run took beyond its replay over the blocks that it moved."""
        live, costs = self._live, self._costs
        played = play(self.recorded, options, live, costs, prompts)
        blocks = moved(played) / len(played.step_s)
        more_s = run.tpot_s - played_s(run, played).mean()
        each_s = float(more_s / blocks) if blocks else 0.0
        load_s = costs.link(options).seconds(live.block_bytes)
        points = [*costs.miss_host_s.get(name, ()), (load_s, each_s)]
        self._note(miss_host_s={**costs.miss_host_s, name: points})
        self._ratios.append(_ratios(run, played, each_s))
        if name == NONE:
            self._waiting.append((load_s, float(np.median(run.ttft_s))))

    def measure_assist(self, name: str, options: OffloadOptions) -> None:
        """What an absent expert costs where the host computes some of them."""
        protocol, live, costs = self._protocol, self._live, self._costs
        given = self._few, protocol.new_tokens, protocol.sampling
        with live.engine(options) as engine:
            run = live.run(engine, *given, rounds=rounds_of(options))
            seen = engine.backends[0].costs
        load_s = costs.link(options).seconds(live.block_bytes)
        asked = {**costs.assist_s, name: (load_s, 0.0, 0.0, *seen)}
        knows_rule = dataclasses.replace(costs, assist_s=asked)
        played = play(self.recorded, options, live, knows_rule, len(self._few))
        absent_BS2 = played.absent.reshape(len(run.step_s), -1, 2)[:, :-1]
        more_BS = undisturbed(run.step_s) - costs.per_predictor_s[NONE]
        found = absent_costs(absent_BS2.reshape(-1, 2), more_BS.reshape(-1))
        self._note(assist_s={**asked, name: (load_s, *found, *seen)})

    def finished(self, base: OffloadOptions) -> ModelCosts:
        """The costs, with those of prompts."""
        tokens = str(len(self._protocol.prompts[0]))
        blocks = self.recorded.prompt_blocks(layer_slots(base, self._live))
        return dataclasses.replace(
            self._costs,
            prefill_s={tokens: {str(self._live.batch): self._first_s}},
            prefill_block_s=[
                (load_s, max(0.0, took_s - self._first_s) / blocks)
                for load_s, took_s in self._waiting
                if blocks
            ],
            noise=float(np.std(np.concatenate(self._ratios), ddof=1)),
        )


def rounds_of(options: OffloadOptions) -> int:
    """How often a run is measured: steps with an assist are short."""
    return ASSISTED_ROUNDS if options.assist is not None else 1


def absent_costs(absent_S2: np.ndarray, more_s_S: np.ndarray) -> tuple[float, float]:
    """Seconds of a layer in which experts are absent, and of each expert: least
    squares, none below 0.

    Args:
      absent_S2: of each step, see `TimedResult`; more_s_S: that it took beyond a step
        whose experts are all here.
    """
    layer_s, each_s = np.linalg.lstsq(absent_S2, more_s_S, rcond=None)[0]
    if each_s < 0:
        layer_s, each_s = _alone(absent_S2[:, 0], more_s_S), 0.0
    elif layer_s < 0:
        layer_s, each_s = 0.0, _alone(absent_S2[:, 1], more_s_S)
    return float(layer_s), float(each_s)


def _alone(absent_S: np.ndarray, more_s_S: np.ndarray) -> float:
    """What one costs where nothing else does."""
    return max(0.0, float(more_s_S.sum()) / max(1, int(absent_S.sum())))


def _has_room(live: Live, options: OffloadOptions) -> bool:
    """Whether the device has room for all experts beside what runs."""
    free_bytes, config = free_device_bytes(), live.config
    blocks = len(config.moe_layers) * config.moe.num_experts
    needed = live.needs(options).other_bytes + blocks * live.block_bytes
    return free_bytes is None or needed <= (1 - SPARE_SHARE) * free_bytes


def _without_waits(run: Run) -> float:
    """Seconds of a step whose experts are all here, of a run in which some are not:
    what a step takes less what it waited for transfers."""
    return max(0.0, float(np.median(run.step_s)) - run.wait_s)


def moved(played: TimedResult) -> int:
    """Blocks that decoding moved."""
    return played.moved.demand.count + played.moved.prefetch.count


def played_s(run: Run, played: TimedResult) -> np.ndarray:
    """float64 [batches, steps - 1]: computed seconds of the steps that were timed."""
    return played.step_s.reshape(len(run.step_s), -1)[:, :-1]


def _ratios(run: Run, played: TimedResult, each_s: float) -> np.ndarray:
    """Measured over computed time, of each batch: what a cost cannot explain.

    What blocks cost is spread evenly over the batches: the mean of the ratios is 1.
    """
    more_s = each_s * moved(played) / len(played.step_s)
    computed_s = played_s(run, played).mean(axis=1) + more_s
    return undisturbed(run.step_s).mean(axis=1) / np.maximum(computed_s, 1e-9)
