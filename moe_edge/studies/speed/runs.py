"""Timed decode runs of any engine, and what offloaded ones routed and moved.

Every run fills its KV cache without throttling, empties the expert slots and decodes
over a fresh emulated link: all runs, and their replay, start from the same state.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import seconds_of
from moe_edge.bench.speed import SuiteSettings
from moe_edge.engine.load import load_engine
from moe_edge.model.sampling import likeliest
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.simulate.replay.recorded import RunLog
from moe_edge.studies.speed.models import olmoe_config

SHARE = "25%"  # of the experts on the device, in the rows over emulated links
PROMPT_TOKENS = 16

greedy = jax.jit(likeliest)  # int32 [B] of logits [B, V]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings(SuiteSettings):
    """How much suite `offload` does; `SuiteSettings` names the rest.

    Attributes:
      hf_config: of the random model that is timed: 0.2 B parameters, d = 512.
      large_config: of the model of at least 2 GB whose memory is measured.
      link_steps: decode steps by link ratio (expert load / a layer's compute).
      host_steps: of the rows without a link.
      smoe_tokens: decode steps of the SMoE rows.
      fidelity_rows: texts of so many tokens that SMoE's fidelity is scored on.
      absolute_memory: an absolute budget for the timed model.
    """

    hf_config: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: olmoe_config(8, "bfloat16", hidden=512, heads=8)
    )
    large_config: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: olmoe_config(18, "bfloat16")
    )
    link_steps: Mapping[float, int] = dataclasses.field(
        default_factory=lambda: {0.5: 32, 2.0: 16, 8.0: 8}
    )
    host_steps: int = 24
    smoe_tokens: int = 48
    fidelity_rows: int = 16
    absolute_memory: str = "200MiB"


def random_prompts(engine, batch: int, tokens: int) -> np.ndarray:
    """int array [batch, tokens] of the model's vocabulary."""
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, tokens))


def load_offloaded(folder, capacity: int = 1024, **options):
    """An offloaded engine without tokenizer; `options`: of `OffloadOptions`. An
    absolute budget leaves room for a KV cache of `capacity` tokens."""
    given = {"offload": studied(**options), "capacity": capacity, "batch": 1}
    return load_engine(folder, with_tokenizer=False, **given).engine


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """What a run of N steps took.

    Attributes:
      step_s: float64 [N].
      tokens: int [N + 1, B], greedy.
      log: of an offloaded run.
      used_blocks: transfers of decoding whose block was computed with.
      waited_s: sum over the steps.
      merged: blocks that shared a neighbour's latency.
    """

    step_s: np.ndarray
    tokens: np.ndarray
    log: RunLog | None = None
    used_blocks: int = 0
    waited_s: float = 0.0
    merged: int = 0

    @property
    def mean_s(self) -> float:
        """Of a step."""
        return float(self.step_s.mean())


def decode_run(
    engine,
    prompts,
    steps: int,
    link: EmulatedLink | None = None,
    cold: bool = True,
    forced: bool = False,
    on_routing=None,
) -> TimedRun:
    """N greedy steps after prompts [B, S], of one chunk; only the steps are timed. The
    host reads every token before the next step, which no engine begins ahead here.

    Args:
      engine: resident, layered or fused.
      link: of decoding, for a layered engine; it is copied, so that no run inherits
        another's backlog.
      cold: False keeps a layered engine's slots as they are, and no log.
      forced: feeds random tokens, the same in every run, instead of the model's own:
        random weights repeat one token for ever, so that nothing would miss.
      on_routing: see `Engine.decode`; of a run that keeps no log.
    """
    B, S = np.shape(prompts)
    layer_step, log, waited = getattr(engine, "layer_step", None), None, {}
    session = engine.new_session(B, S + steps + 1)
    if layer_step is not None:
        engine.predictor_run.restart()
    next_B = greedy(engine.prefill(session, prompts))
    active_B = jax.device_put(np.ones(B, bool))
    tokens, step_s = [np.asarray(next_B)], []
    if layer_step is not None and cold:
        layer_step.empty()
        layer_step.reset_counters()
        engine.queue.carriers[0].link = (link or TransferLink()).again()
        run, spec = engine.predictor_run, layer_step.spec
        log = RunLog(spec.num_layers, spec.num_experts, run.horizon)
        run.accuracy, on_routing = log, log.lookup
    rng = np.random.default_rng(1)
    fed_NB = rng.integers(0, engine.config.vocab_size, (steps, B)).astype(np.int32)
    fed_NB = [jax.device_put(fed_B) for fed_B in fed_NB]
    before = _used_blocks(engine)
    for fed_B in fed_NB:
        started = time.perf_counter()
        fed_B = fed_B if forced else next_B
        next_B = greedy(engine.decode(session, fed_B, active_B, on_routing))
        tokens.append(np.asarray(next_B))
        step_s.append(time.perf_counter() - started)
    if layer_step is not None:
        waited = {"waited_s": layer_step.counters[True].wait_s}
        waited["merged"] = engine.queue.stats().merged
        engine.queue.carriers[0].link = TransferLink()
        layer_step.drain()
    used_blocks = _used_blocks(engine) - before
    return TimedRun(np.array(step_s), np.stack(tokens), log, used_blocks, **waited)


def _used_blocks(engine) -> int:
    """Transfers so far whose block was computed with; 0 of a resident engine."""
    if hasattr(engine, "counts"):
        return int(engine.counts().misses_L.sum())
    if not hasattr(engine, "layer_step"):
        return 0
    queue = engine.queue
    stats, moved = queue.stats(), engine.movement()["bytes_moved"]
    return (moved - stats.wasted_bytes - stats.unused_bytes) // queue.block_bytes


def check_same_tokens(name: str, run: TimedRun, resident: TimedRun) -> None:
    """Raises RuntimeError if a run wrote other tokens than the resident engine."""
    if not np.array_equal(run.tokens, resident.tokens):
        first = int(np.argmax((run.tokens != resident.tokens).any(axis=1)))
        raise RuntimeError(
            f"{name} is no lossless run: token {first} differs from the resident "
            "engine's, so its time would compare different work"
        )


# What a machine adds to an offloaded step, measured on a resident engine of one layer a
# program (`Bench.by_layer`): an emulated link shares cores and memory with the model,
# and a host that plans every layer reads every layer's routing. These runs pay for that
# alone: no lookup, no miss.


def _check_borders(engine) -> None:
    """Raises ValueError for an engine whose layers end together."""
    if engine.layers_per_program != 1:
        raise ValueError(
            f"{engine.layers_per_program} layers a program, expected one: `by_layer`"
        )


def layer_share(engine, prompts, steps: int) -> float:
    """Share of a resident engine's step that its layers take, from layer borders."""
    _check_borders(engine)
    stamps: list[float] = []

    def stamp(layer, routing):
        routing.ids_TK.block_until_ready()
        stamps.append(time.perf_counter())

    run = decode_run(engine, prompts, steps, on_routing=stamp)
    layer_s_N = np.median(np.diff(np.reshape(stamps, (steps, -1))), axis=1)
    share_N = engine.config.num_layers * layer_s_N / run.step_s
    return float(np.median(np.minimum(share_N, 1.0)))


def step_after_waits(engine, prompts, steps: int, wait_s: float) -> float:
    """Mean seconds of a resident engine's step that rests after every layer, less the
    rest: what the same computation costs a processor that was idle. Other programs,
    and on a virtual machine other machines, have had its caches meanwhile."""
    _check_borders(engine)
    rested_s: list[float] = []

    def rest(layer, routing):
        routing.ids_TK.block_until_ready()
        if wait_s > 0:
            rested_s.append(seconds_of(functools.partial(time.sleep, wait_s)))

    run = decode_run(engine, prompts, steps, on_routing=rest)
    return run.mean_s - sum(rested_s) / steps


def step_beside_transfers(
    engine,
    offloaded,
    prompts,
    steps: int,
    link: EmulatedLink,
    blocks_per_step: float,
    forced: bool = False,
) -> float:
    """Mean seconds of a resident step that reads every routing while blocks travel.

    A layer waits for no block of its own; at most half the slots are on their way. The
    blocks still travelling after the last step are waited for, and counted.

    Args:
      engine: resident; all its layers have experts.
      offloaded: an engine whose slots are emptied.
      link: of the transfers.
      blocks_per_step: how many, spread evenly over the layers.
      forced: see `decode_run`.
    """
    _check_borders(engine)
    queue, spec = offloaded.queue, offloaded.cache.spec
    blocks = spec.num_layers * spec.num_experts
    stride = spec.num_experts + 1  # another layer and another expert each time
    underway, asked, calls = deque(), 0, 0

    def read_and_ask(layer, routing):
        nonlocal asked, calls
        np.asarray(routing.ids_TK)
        queue.poll()
        calls += 1
        while asked + 1 <= blocks_per_step * calls / spec.num_layers:
            if len(underway) >= spec.num_slots // 2:
                queue.wait([underway.popleft()])
            block = divmod(asked * stride % blocks, spec.num_experts)
            slot = asked % spec.num_slots
            underway.append(queue.request(*block, slot, "demand"))
            asked += 1

    offloaded.layer_step.empty()  # the cache knows nothing of what is written below
    queue.carriers[0].link = link.again()
    try:
        run = decode_run(engine, prompts, steps, forced=forced, on_routing=read_and_ask)
        waited_s = seconds_of(functools.partial(queue.wait, underway))
    finally:
        queue.carriers[0].link = TransferLink()
    return run.mean_s + waited_s / steps
