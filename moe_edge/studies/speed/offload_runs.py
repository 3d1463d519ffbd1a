"""Timed greedy runs of an offloaded engine, and what they routed and moved.

Every run fills its KV cache without throttling, empties the expert slots and decodes
over a fresh emulated link: all runs, and their replay, start from the same state.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.link import EmulatedLink, Link
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.base import Predictor, no_prediction
from moe_edge.simulate.replay.lookups import chosen_by_step
from moe_edge.studies.speed.decode import argmax
from moe_edge.studies.speed.models import olmoe_config, write_random
from moe_edge.studies.speed.suite import SuiteSettings
from moe_edge.workload.traces import DECODE, Trace, TraceRecorder

SHARE = "25%"  # of the experts on the device, in the rows over emulated links
PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings(SuiteSettings):
    """How much suite `offload` does; `SuiteSettings` names the rest.

    Attributes:
      hf_config: of the random model that is timed: 0.2 B parameters, d = 512.
      large_config: of the model of at least 2 GB whose memory is measured.
      link_steps: decode steps by link ratio (expert load / a layer's compute).
      host_steps: of the rows without a link.
      smoe_tokens: decode steps of the SMoE row.
      fidelity_tokens: scored of each held-out text.
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
    fidelity_tokens: int = 256
    absolute_memory: str = "200MiB"


def timed_models(work_dir: Path, settings: OffloadSettings) -> list[tuple[str, Path]]:
    """Name and HF folder of the models that are timed."""
    folder = write_random(work_dir / "olmoe_d512", settings.hf_config)
    return [("olmoe_d512", folder), ("default", DEFAULT_MODEL)]


class RunLog(PredictionLog):
    """Also keeps what every decode lookup chose, and what was predicted after it."""

    def __init__(self, num_layers: int, num_experts: int, look_ahead: int):
        super().__init__(num_layers, num_experts, look_ahead)
        self.layers: list[int] = []
        self.ids: list[np.ndarray] = []
        self.predicted: list[np.ndarray | None] = []

    def lookup(self, layer, routing):
        """Takes in a layer's routing, as an engine's `on_routing`."""
        self.layers.append(layer)
        self.ids.append(np.array(routing.ids_TK))
        self.predicted.append(None)

    def expect(self, layer, ids_NM):
        super().expect(layer, ids_NM)
        self.predicted[-1] = np.array(ids_NM)


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed(Predictor):
    """Repeats what a run predicted, lookup by lookup."""

    predicted: list[np.ndarray | None]
    name = "recorded"
    needs = frozenset({"ids"})

    def init(self, spec):
        return {"lookup": -1}

    def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
        return {"lookup": state["lookup"] + 1}

    def predict(self, state, layer, horizon):
        ids_NM = self.predicted[state["lookup"]]
        if ids_NM is None:
            return no_prediction(horizon)
        return ids_NM, np.zeros(ids_NM.shape, np.float32)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of N steps took.

    Attributes:
      step_s: float64 [N].
      tokens: int [N + 1, B], greedy.
      log: of an offloaded run; None for a resident one.
      used_blocks: transfers of decoding whose block was computed with.
      waited_s: sum over the steps.
    """

    step_s: np.ndarray
    tokens: np.ndarray
    log: RunLog | None = None
    used_blocks: int = 0
    waited_s: float = 0.0


def decode_run(
    engine,
    prompts,
    steps: int,
    link: EmulatedLink | None = None,
    cold: bool = True,
    forced: bool = False,
    on_routing=None,
) -> Run:
    """Greedy steps after the (untimed) prompts; see the top of this file.

    Args:
      engine: resident, layered or fused.
      prompts: int array [B, S], one chunk long at most.
      steps: N.
      link: of decoding, for a layered engine; it is copied, so that no run inherits
        another's backlog.
      cold: False keeps a layered engine's slots as they are, and no log.
      forced: feeds random tokens, the same in every run, instead of the model's own:
        random weights repeat one token for ever, so that nothing would miss.
      on_routing: see `Engine.decode`; of a resident engine.
    """
    B, S = np.shape(prompts)
    manager = getattr(engine, "manager", None)
    session = engine.new_session(B, S + steps + 1)
    if manager is not None:
        manager.predictor_run.restart()
    next_B = argmax(engine.prefill(session, prompts))
    active_B = jax.device_put(np.ones(B, bool))
    tokens, step_s, log = [np.asarray(next_B)], [], None
    if manager is not None and cold:
        start_cold(manager, link)
        spec = manager.spec
        log = RunLog(spec.num_layers, spec.num_experts, manager.predictor_run.horizon)
        manager.predictor_run.accuracy, on_routing = log, log.lookup
    rng = np.random.default_rng(1)
    fed_NB = rng.integers(0, engine.config.vocab_size, (steps, B)).astype(np.int32)
    fed_NB = [jax.device_put(fed_B) for fed_B in fed_NB]
    before = _used_blocks(engine)
    for fed_B in fed_NB:
        started = time.perf_counter()
        fed_B = fed_B if forced else next_B
        next_B = argmax(engine.decode(session, fed_B, active_B, on_routing))
        tokens.append(np.asarray(next_B))
        step_s.append(time.perf_counter() - started)
    waited_s = 0.0
    if manager is not None:
        waited_s = manager.counters[True].wait_s
        manager.queue.link = Link()
        manager.drain()
    used_blocks = _used_blocks(engine) - before
    return Run(np.array(step_s), np.stack(tokens), log, used_blocks, waited_s)


def start_cold(manager, link: EmulatedLink | None) -> None:
    """Empties the slots, starts counting and switches the link on."""
    manager.empty()
    manager.reset_counters()
    if link is not None:
        manager.queue.link = EmulatedLink(link.bytes_per_s, link.latency_s)


def _used_blocks(engine) -> int:
    """Transfers so far whose block was computed with; 0 of a resident engine."""
    if hasattr(engine, "counts"):
        return int(engine.counts().misses_L.sum())
    if not hasattr(engine, "manager"):
        return 0
    queue = engine.manager.queue
    stats = queue.stats()
    moved = stats.demand.bytes + stats.prefetch.bytes
    return (moved - stats.wasted_bytes - stats.unused_bytes) // queue.store.block_bytes


def trace_of(run: Run, num_experts: int) -> Trace:
    """The decode lookups of an offloaded run."""
    log, step = run.log, -1
    recorder = TraceRecorder(num_experts, log.ids[0].shape[1])
    first = log.layers[0]
    for layer, ids_TK in zip(log.layers, log.ids, strict=True):
        step += layer == first
        nothing_TK = np.zeros(ids_TK.shape)
        recorder.add(DECODE, step, layer, ids_TK, nothing_TK, nothing_TK)
    return recorder.trace()


def foreseen(run: Run, num_experts: int) -> np.ndarray:
    """int32 [1 + N, L, M] for `Oracle`: what the steps choose; the prompt is step 0."""
    chosen_SLM = chosen_by_step(trace_of(run, num_experts))
    return np.pad(chosen_SLM, ((1, 0), (0, 0), (0, 0)), constant_values=-1)


def load_offloaded(folder, *, batch: int = 1, capacity: int = 1024, **options):
    """An offloaded engine without tokenizer.

    Args:
      folder: the checkpoint.
      batch, capacity: for whose KV cache an absolute budget leaves room.
      **options: of `OffloadOptions`.
    """
    return load_engine(
        folder,
        with_tokenizer=False,
        offload=OffloadOptions(**options),
        batch=batch,
        capacity=capacity,
    ).engine


def check_same_tokens(name: str, run: Run, resident: Run) -> None:
    """Raises RuntimeError if a run wrote other tokens than the resident engine."""
    if not np.array_equal(run.tokens, resident.tokens):
        first = int(np.argmax((run.tokens != resident.tokens).any(axis=1)))
        raise RuntimeError(
            f"{name} is no lossless run: token {first} differs from the resident "
            "engine's, so its time would compare different work"
        )


def layer_share(engine, prompts, steps: int) -> float:
    """Share of a resident engine's step that its layers take, from layer borders."""
    stamps: list[float] = []

    def stamp(layer, routing):
        routing.ids_TK.block_until_ready()
        stamps.append(time.perf_counter())

    B, S = np.shape(prompts)
    session = engine.new_session(B, S + steps + 1)
    next_B = argmax(engine.prefill(session, prompts))
    active_B = jax.device_put(np.ones(B, bool))
    np.asarray(next_B)
    L, shares = engine.config.num_layers, []
    for _ in range(steps):
        stamps.clear()
        started = time.perf_counter()
        next_B = argmax(engine.decode(session, next_B, active_B, stamp))
        np.asarray(next_B)
        step_s = time.perf_counter() - started
        shares.append(min(1.0, L * statistics.median(np.diff(stamps)) / step_s))
    return statistics.median(shares)
