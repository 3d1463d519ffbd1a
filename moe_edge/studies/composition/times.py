"""What a step takes: replayed over an emulated link, from steps that were measured."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.rounds import round_order
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.progress import progress
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_forced
from moe_edge.offload.evict_base import get_eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.predict.oracle import Oracle
from moe_edge.simulate.replay.lookups import chosen_by_step, equal_slots
from moe_edge.simulate.replay.timed import CostModel, TimedResult, replay_time
from moe_edge.studies.composition.methods import Method
from moe_edge.workload.trace_writer import write_trace
from moe_edge.workload.traces import DECODE, PREFILL, Trace

TIMED_ROWS = 5  # rows of tokens that steps are timed on, and the first only warms


@dataclasses.dataclass(frozen=True)
class Steps:
    """What was measured on this machine.

    Attributes:
      hit_s: a decode step of a method all of whose experts are in slots.
      miss_s: what the host does for a miss, besides waiting for the link.
      layer_s: a layer of the bfloat16 model, whose multiples name links.
    """

    hit_s: float
    miss_s: float
    layer_s: float


def options_of(method: Method, slots: int, experts: int, link: EmulatedLink | None):
    """How an engine runs a method with so many slots a layer."""
    given = {} if link is None else {"link_bytes_per_s": link.bytes_per_s}
    if link is not None:
        given["link_latency_s"] = link.latency_s
    return OffloadOptions(
        device_memory=f"{100 * slots / experts:.6f}%",
        mode="layered",
        slot_plan="equal",
        eviction=method.eviction,
        route=method.route,
        route_options=dict(method.options),
        **given,
    )


@dataclasses.dataclass(frozen=True)
class Timed:
    """What is timed: a method on a checkpoint.

    Attributes:
      slots: of each layer; k: of a token; link: emulated, None: as fast as the memory.
    """

    checkpoint: str
    method: Method
    slots: int
    k: int | None
    link: EmulatedLink | None = None


def measured_steps(
    cases: Mapping[str, Timed], rows: Sequence[Sequence[int]], by_processor: bool
) -> dict[str, tuple[float, float]]:
    """Seconds of a decode step on real text, and the misses of it, of every case.

    Cases take turns row by row, so that what disturbs a moment disturbs all alike. The
    first row compiles and warms; of the others the lower quartile.

    Args:
      by_processor: by the processor's time of this process, waits left out.
    """
    clock = time.process_time if by_processor else time.perf_counter
    programs: dict[tuple[str, int | None], LayerPrograms] = {}
    steps_s: dict[str, list[float]] = {name: [] for name in cases}
    misses: dict[str, list[float]] = {name: [] for name in cases}
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, case in progress(cases.items(), "engines of methods"):
            key = case.checkpoint, case.k
            engine = stack.enter_context(_engine(case, len(rows[0]), programs.get(key)))
            programs[key] = engine.programs
            engines[name] = engine
        timed = progress(rows[:TIMED_ROWS], "rounds of decode steps timed")
        for number, row in enumerate(timed):
            for name in round_order(list(engines), number):
                engine = engines[name]
                engine.reset_records()
                begun_s = clock()
                run = score_forced(engine, [Forced(list(row), 1)])
                steps_s[name].append((clock() - begun_s) / run.steps)
                misses[name].append(engine.layer_step.counters[True].misses / run.steps)
    return {
        name: (float(np.quantile(steps_s[name][1:], 0.25)), np.mean(misses[name][1:]))
        for name in cases
    }


def _engine(case: Timed, capacity: int, programs: LayerPrograms | None):
    experts = open_checkpoint(case.checkpoint).config.moe.num_experts
    options = options_of(case.method, case.slots, experts, case.link)
    room = {"batch": 1, "capacity": capacity, "k": case.k, "with_tokenizer": False}
    return load_engine(
        case.checkpoint, offload=options, programs=programs, **room
    ).engine


def save_cut(path: Path, trace: Trace, steps: int) -> None:
    """Writes the last steps of a trace, after as many that only warm the cache.

    Args:
      path: in a folder of its own, for the scores.
    """
    last = int(trace.step.max()) + 1
    kept = trace.step >= last - 2 * steps
    arrays = {
        field.name: None if (a := getattr(trace, field.name)) is None else a[kept]
        for field in dataclasses.fields(trace)[2:]
    }
    warms = arrays["step"] < last - steps
    arrays["phase"] = np.where(warms, PREFILL, DECODE).astype(np.int32)
    arrays["request"] = np.zeros_like(arrays["step"])  # one run of the cache
    kept_trace = Trace(trace.num_experts, trace.top_k, **arrays)
    write_trace(path, kept_trace, with_scores=True)


def moves(
    trace: Trace, method: Method, slots: int, block_bytes: int
) -> tuple[float, float]:
    """Transfers and blocks a token of a trace of `save_cut`, without prefetching.

    The link rests when a layer asks, and the layer waits for all it asked for. So they
    are the same over every link.
    """
    link = EmulatedLink(1e9, 0.0)
    found = _replay(trace, method, slots, block_bytes, link, 1e-3)
    tokens, moved = len(found.step_s), found.moved.demand.bytes / block_bytes
    return (moved - found.moved.merged) / tokens, moved / tokens


def time_of(
    runs: float, moved: float, block_bytes: int, link: EmulatedLink, steps: Steps
) -> float:
    """Seconds a token that makes so many transfers of so many blocks in all."""
    wait_s = runs * link.latency_s + moved * block_bytes / link.bytes_per_s
    return steps.hit_s + wait_s + steps.miss_s * moved


def foreseen(
    trace: Trace,
    method: Method,
    slots: int,
    block_bytes: int,
    link: EmulatedLink,
    steps: Steps,
) -> tuple[float, float]:
    """Seconds a token with an oracle's prefetches over a link, and blocks moved.

    Half of a layer's compute comes before its routing is known. A shadow takes as long
    as the layers of the bfloat16 model, before them.
    """
    found = _replay(trace, method, slots, block_bytes, link, steps.hit_s)
    sent = found.moved.demand.bytes + found.moved.prefetch.bytes
    moved = sent / block_bytes / len(found.step_s)
    layers = len(np.unique(trace.layer))
    shadow_s = steps.layer_s * layers if method.shadow else 0.0
    return found.tpot_s + shadow_s + steps.miss_s * moved, moved


def _replay(trace, method: Method, slots, block_bytes, link, hit_s) -> TimedResult:
    layers = len(np.unique(trace.layer))
    given: dict[str, Any] = {}
    if method.foresight:
        given["predictor"] = Oracle(chosen_SLK=chosen_by_step(trace))
        given["prefetch_limit"] = method.foresight * trace.top_k
        given["horizon"] = min(method.foresight, layers)
    return replay_time(
        trace,
        get_eviction(method.eviction),
        equal_slots(trace, slots),
        CostModel(hit_s / layers / 2, hit_s / layers / 2, block_bytes, link),
        **given,
    )
