"""Measures what a plan asks of this machine for one checkpoint, in bounded time.

For each predictor a decode step whose experts are all here, a run with misses over the
fastest link and one over the user's. What these take beyond the replay of their own
lookups is spread over the blocks that were moved. Which experts are chosen and
predicted is recorded on the way: replay then needs no further run.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.core.progress import progress
from moe_edge.engine.devices import SPARE_SHARE
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import free_device_bytes
from moe_edge.model.sampling import Sampling
from moe_edge.planner.costs import ModelCosts
from moe_edge.planner.live import Live, Run, undisturbed
from moe_edge.planner.replayed import Recorded, layer_slots, play
from moe_edge.simulate.replay.timed import TimedResult

NONE = "none"
FEW = 4  # batches of runs that decide a cost, not a mean over prompts
ALL_HERE = "100%"


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
    fast = dataclasses.replace(base, link_bytes_per_s=None, link_latency_s=0.0)
    few = protocol.prompts[: FEW * live.batch]
    new, sampling = protocol.new_tokens, protocol.sampling
    every = protocol.prompts if recorded is None else few
    if recorded is None:
        with live.engine(fast, with_trace=True) as engine:
            run = live.run(engine, protocol.prompts, new, sampling)
        recorded = Recorded(run.trace, {}, protocol.sampling.temperature)
    hit_s: dict[str, float] = {}
    host_s: dict[str, list] = {}
    share = copy_s = 0.0
    ttft: list[tuple[float, float, float]] = []  # seconds, load_s, blocks
    ratios, left_out = [], []
    names = [NONE, *(name for name in predictors if name != NONE)]
    for name in progress(names, "predictors calibrated"):
        if name != NONE and time.perf_counter() - begun_s > protocol.limit_s:
            left_out.append(name)
            continue
        asked = predictors.get(name, base)
        here = dataclasses.replace(asked, device_memory=ALL_HERE, **_OWN_LINK)
        holds_all = _has_room(live, here)
        some = dataclasses.replace(asked, **_OWN_LINK)
        with live.engine(here if holds_all else some) as engine:
            run = live.run(engine, few, new, sampling, rounds=2)
        hit_s[name] = float(np.median(run.step_s))
        if not holds_all:
            hit_s[name] = _without_waits(run)
        if name == NONE:
            layers = len(live.config.moe_layers)
            step_s = float(np.median(run.step_s))
            share = min(1.0, run.log.layer_s() * layers / step_s)
            ttft.append((float(np.median(run.ttft_s)), 0.0, 0.0))
        host_s[name] = []
        for options, prompts in _links(asked, every, few):
            with live.engine(options) as engine:
                run = live.run(engine, prompts, new, sampling)
            if options.link_bytes_per_s is None:
                if every is protocol.prompts:
                    recorded = recorded.with_predictions(name, run.log.predicted)
                copy_s = run.load_s if name == NONE else copy_s
            costs = _costs(live, hit_s, host_s, share, copy_s)
            link = costs.link(options)
            played = play(recorded, options, live, costs, len(prompts))
            blocks = moved(played) / len(played.step_s)
            more_s = run.tpot_s - played_s(run, played).mean()
            each_s = more_s / blocks if blocks else 0.0
            load_s = link.seconds(live.block_bytes)
            host_s[name].append((load_s, each_s))
            ratios.append(_ratios(run, played, each_s))
            if name == NONE:
                ttft.append((float(np.median(run.ttft_s)), load_s, 1.0))
    assist_s = {}
    for name in assists:
        if time.perf_counter() - begun_s > protocol.limit_s:
            left_out.append(name)
            continue
        options = dataclasses.replace(base, assist=name)
        with live.engine(options) as engine:
            run = live.run(engine, few, new, sampling)
        load_s = costs.link(options).seconds(live.block_bytes)
        more_s = max(0.0, run.tpot_s - hit_s[NONE])
        assist_s[name] = (load_s, more_s / run.misses if run.misses else 0.0)
    costs = _costs(live, hit_s, host_s, share, copy_s)
    tokens, batch = len(protocol.prompts[0]), str(live.batch)
    blocks = recorded.prompt_blocks(layer_slots(base, live))
    costs = dataclasses.replace(
        costs,
        assist_s=assist_s,
        prefill_s={str(tokens): {batch: ttft[0][0]}},
        prefill_block_s=[
            (load_s, max(0.0, took_s - ttft[0][0]) / blocks)
            for took_s, load_s, is_missing in ttft
            if is_missing and blocks
        ],
        noise=float(np.std(np.concatenate(ratios), ddof=1)),
        temperature=sampling.temperature,
        steps=len(recorded.decode_steps),
    )
    return Calibrated(costs, recorded, left_out)


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


_OWN_LINK = {"link_bytes_per_s": None, "link_latency_s": 0.0}


def _links(options: OffloadOptions, prompts, few):
    """Options and prompts at the fastest and at the user's link."""
    yield dataclasses.replace(options, **_OWN_LINK), prompts
    if options.link_bytes_per_s is not None:
        yield options, few


def _costs(live: Live, hit_s, host_s, share: float, copy_s: float) -> ModelCosts:
    return ModelCosts(
        batch=live.batch,
        layered_s=hit_s[NONE],
        layer_share=share,
        per_predictor_s=dict(hit_s),
        miss_host_s={name: list(points) for name, points in host_s.items()},
        copy_s=copy_s,
        prefill_s={},
        prefill_block_s=(),
        block_bytes=live.block_bytes,
        dense_bytes=live.dense_bytes,
        noise=0.0,
        temperature=0.0,
        steps=0,
    )


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
