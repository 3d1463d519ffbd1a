"""Suite `offload`: offloaded runs compared with what link, compute and memory allow.

Also here: the host's cost of `layered` where every expert is hit, what a miss costs in
`fused` and on the host, and SMoE complete against lossless offloading: its time, and
what it costs.
"""

import dataclasses
import functools
import statistics
from pathlib import Path

import numpy as np

from moe_edge.bench.cases import Case
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import MS, Models, Rows, make_row, speed_study
from moe_edge.bench.timed_cases import TimedSettings, run_cases
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.engine.load import load_engine
from moe_edge.papers.smoe.studies.fig14 import smoe_steps
from moe_edge.studies.speed.models import write_random
from moe_edge.studies.speed.offload_accelerate import accelerate_rows
from moe_edge.studies.speed.offload_assist import assist_rows
from moe_edge.studies.speed.offload_links import LATENCY_S, OPTIONS, link_rows
from moe_edge.studies.speed.offload_memory import (
    device_rows,
    large_ours,
    large_source,
    process_rows,
)
from moe_edge.studies.speed.runs import (
    PROMPT_TOKENS,
    SHARE,
    OffloadSettings,
    decode_run,
    load_offloaded,
    random_prompts,
)

HOST_ROUNDS = 5  # of the rows without a link, for one of the others
HOST_MS = 0.2  # a layer, at d = 512
COPIES = 1.3  # of the missed bytes
COPIED_BLOCKS = 64


LINK_RATIO = 2.0
AIM = 0.55
BATCH = 3
SMOE = smoe_steps(0.2)["+BA"]  # as configs/policies/smoe.gin
_EQUAL = {"eviction": "lru", "slot_plan": "equal"}
_PARTIAL = {"predictor": "smoe_partial", "predictor_options": {"top_a": None}}
_ASSIST = {"assist": "two_pointer"}
LOSSLESS = {
    "lru, equal slots": _EQUAL,
    "lfu": {"eviction": "lfu"},
    "lfu, smoe_partial": {"eviction": "lfu"} | _PARTIAL,
    "lru, equal slots, smoe_partial": _EQUAL | _PARTIAL,
    "lfu, assist": {"eviction": "lfu"} | _ASSIST,
    "lru, equal slots, smoe_partial, assist": _EQUAL | _PARTIAL | _ASSIST,
}


def offload_models(settings: OffloadSettings, work_dir: Path) -> Models:
    """Name and HF folder of the models that are run."""
    timed = write_random(work_dir / "olmoe_d512", settings.hf_config)
    large = large_source(work_dir, settings)
    return [
        ("olmoe_d512", timed),
        ("default", DEFAULT_MODEL),
        ("olmoe_large", large),
    ]


def offload_rows(settings: OffloadSettings, work_dir: Path) -> Rows:
    """All rows: memory, host cost, CPU assist, links, SMoE."""
    repeats = settings.repeats
    random, default, _ = offload_models(settings, work_dir)
    # Processes first: their memory is then not competed for by our own engines.
    rows = process_rows(work_dir, settings)
    large = large_source(work_dir, settings), large_ours(work_dir, settings)
    rows += accelerate_rows(*large, repeats)
    rows += device_rows(*random, settings)
    # A small difference of short runs: more rounds.
    rows += host_rows(*random, settings, HOST_ROUNDS * repeats)
    rows += assist_rows(*random, repeats)
    rows += assist_rows("olmoe_large", large[1], repeats)
    rows += link_rows(*random, settings, OPTIONS, forced=True)
    rows += link_rows(*default, settings, ("none",))
    return rows + smoe_rows(settings)


def host_rows(name: str, folder, settings: OffloadSettings, repeats: int) -> Rows:
    """`layered` at 100 %, `fused` at 100 % and 50 %, and resident, in turn."""
    resident = load_engine(folder, with_tokenizer=False).engine
    prompts, steps = random_prompts(resident, 1, PROMPT_TOKENS), settings.host_steps
    layered = load_offloaded(folder, device_memory="100%")
    fused = {
        share: load_offloaded(folder, device_memory=f"{share}%", mode="fused")
        for share in (100, 50)
    }
    store = layered.queue.store
    cases = {
        "resident": functools.partial(_median_s, resident, prompts, steps),
        "layered": functools.partial(_all_hit_s, layered, prompts, steps),
        "copy": functools.partial(_copy_s, store, np.random.default_rng(0)),
    }
    for share, engine in fused.items():
        cases[share] = functools.partial(_fused_s, engine, prompts, steps, share < 100)
    figures = interleave(cases, repeats)
    resident_ms, layered_ms, copy_ms = (
        MS * np.array(figures[name]) for name in ("resident", "layered", "copy")
    )
    resident = {"resident_ms_per_token": statistics.median(resident_ms)}
    rows = [
        make_row(
            f"{name}, layered host cost, all hit",
            (layered_ms - resident_ms) / layered.config.num_layers,
            "ms/layer",
            peer=[HOST_MS] * repeats,
            peer_name="bar",
            bar=1.0,
            **resident,
        )
    ]
    for share in fused:
        ours_s, misses = np.array(figures[share]).T
        rows.append(
            make_row(
                f"{name}, fused {share} %",
                MS * ours_s,
                "ms/token",
                peer=resident_ms + COPIES * misses * copy_ms,
                peer_name=f"resident + {COPIES} x copy of misses",
                bar=1.0,
                misses_per_token=statistics.median(misses),
                copy_ms_per_block=statistics.median(copy_ms),
                **resident,
            )
        )
    layered.close()
    return rows


def _median_s(engine, prompts, steps: int) -> float:
    """Median seconds of a step of the resident engine."""
    return float(np.median(decode_run(engine, prompts, steps, forced=True).step_s))


def _all_hit_s(engine, prompts, steps: int) -> float:
    """Median seconds of a step of `layered` once the run's experts are all there."""
    decode_run(engine, prompts, steps, cold=False, forced=True)
    engine.reset_records()
    run = decode_run(engine, prompts, steps, cold=False, forced=True)
    if engine.layer_step.counters[True].misses:
        raise RuntimeError("a budget of 100 % missed experts that an equal run loaded")
    return float(np.median(run.step_s))


def _fused_s(engine, prompts, steps: int, cold: bool) -> tuple[float, float]:
    """Mean seconds and misses of a step; if not `cold`, an equal run before has filled
    the slots."""
    if cold:
        engine.clear()
    run = decode_run(engine, prompts, steps, forced=True)
    return run.mean_s, run.used_blocks / steps


def _copy_s(store, rng) -> float:
    """Seconds to copy one block of the store, as a plain copy in one thread."""
    layers = rng.choice(store.moe_layers, COPIED_BLOCKS)
    experts = rng.choice(store.num_experts, COPIED_BLOCKS)
    sources = [store.record(*at) for at in zip(layers, experts, strict=True)]
    # Filled, so that no page is touched for the first time while the clock runs.
    target_SR = np.full((COPIED_BLOCKS, store.record_size), 1, store.dtype)

    def copy():
        for row, source_R in zip(target_SR, sources, strict=True):
            np.copyto(row, source_R)

    return seconds_of(copy) / COPIED_BLOCKS


def smoe_rows(settings: OffloadSettings) -> Rows:
    """SMoE against our best lossless configuration, with and without CPU assist.

    With assist the lossless ones are equal up to rounding (interfaces.md, gate B),
    without it bit by bit.
    """
    sizes = TimedSettings(
        rounds=settings.repeats,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=settings.smoe_tokens,
        batches=(BATCH,),
        link_factor=LINK_RATIO,
        link_latency_s=LATENCY_S,
        fidelity_rows=settings.fidelity_rows,
    )
    named = {name: studied(**options) for name, options in LOSSLESS.items()}
    cases = [
        Case(name, SHARE, BATCH, options)
        for name, options in ({"smoe": SMOE} | named).items()
    ]
    with Bench(DEFAULT_MODEL) as bench:
        timing = run_cases(bench, cases, sizes)
    times_ms = {c.policy: MS * np.array(timing[c.key].tpot_s) for c in cases}
    medians_ms = {name: statistics.median(times) for name, times in times_ms.items()}
    rows = []
    for kind, names in (
        ("lossless", list(LOSSLESS)),
        ("lossless without assist", [n for n in LOSSLESS if "assist" not in n]),
    ):
        best = min(names, key=medians_ms.get)
        rows.append(
            make_row(
                f"default, 25 %, batch {BATCH}, emulated link {LINK_RATIO:g}x, SMoE "
                f"beside {kind}",
                times_ms["smoe"],
                "ms/token",
                peer=times_ms[best],
                peer_name=f"best {kind}: {best}",
                bar=AIM,
                emulated=True,
                peers=medians_ms,
                resident_ms_per_token=MS * statistics.median(timing.resident_s[BATCH]),
                fidelity=dataclasses.asdict(timing["smoe", SHARE, BATCH].fidelity),
                checks=timing.checks(),
                link=timing.ready.link.describe(),
            )
        )
    return rows


STUDY = speed_study(
    "offload",
    "How close does offloaded decoding come to what link, compute and memory allow?",
    offload_rows,
    offload_models,
    settings=OffloadSettings,
    inline=True,
)
