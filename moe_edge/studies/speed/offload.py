"""Suite `offload`: offloaded runs compared with what link, compute and memory allow.

Also here: the host's cost of `layered` where every expert is hit, and what a miss costs
in `fused`. Cases over an emulated link say so.
"""

import functools
import statistics
from pathlib import Path

import numpy as np

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.engine.load import load_engine
from moe_edge.studies.rounds import interleave, seconds_of
from moe_edge.studies.speed.models import write_random
from moe_edge.studies.speed.offload_links import OPTIONS, link_rows
from moe_edge.studies.speed.offload_memory import (
    device_rows,
    large_source,
    process_rows,
)
from moe_edge.studies.speed.offload_smoe import smoe_rows
from moe_edge.studies.speed.runs import (
    PROMPT_TOKENS,
    OffloadSettings,
    decode_run,
    load_offloaded,
    random_prompts,
)
from moe_edge.studies.speed.suite import MS, Models, Rows, make_row, speed_study

HOST_ROUNDS = 5  # of the rows without a link, for one of the others
HOST_MS = 0.2  # a layer, at d = 512
COPIES = 1.3  # of the missed bytes
COPIED_BLOCKS = 64


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
    """All rows: memory, host cost, links, SMoE."""
    repeats = settings.repeats
    random, default, _ = offload_models(settings, work_dir)
    # Processes first: their memory is then not competed for by our own engines.
    rows = process_rows(work_dir, settings)
    rows += device_rows(*random, settings)
    # A small difference of short runs: more rounds.
    rows += host_rows(*random, settings, HOST_ROUNDS * repeats)
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
    store = layered.manager.queue.store
    cases = {
        "resident": functools.partial(_median_s, resident, prompts, steps),
        "layered": functools.partial(_all_hit_s, layered, prompts, steps),
        "copy": functools.partial(_copy_s, store, np.random.default_rng(0)),
    }
    for share, engine in fused.items():
        cases[share] = functools.partial(_fused_s, engine, prompts, steps, share < 100)
    figures = interleave(cases, repeats)
    L = resident.config.num_layers
    pairs = zip(figures["layered"], figures["resident"], strict=True)
    rows = [
        make_row(
            f"{name}, layered host cost, all hit",
            [MS * (ours - base) / L for ours, base in pairs],
            "ms/layer",
            peer=[HOST_MS] * repeats,
            peer_name="bar",
            bar=1.0,
            resident_ms_per_token=MS * statistics.median(figures["resident"]),
        )
    ]
    for share in fused:
        ours_s, misses = zip(*figures[share], strict=True)
        allowed_s = [
            base + COPIES * count * copy
            for base, count, copy in zip(
                figures["resident"], misses, figures["copy"], strict=True
            )
        ]
        rows.append(
            make_row(
                f"{name}, fused {share} %",
                [MS * value for value in ours_s],
                "ms/token",
                peer=[MS * value for value in allowed_s],
                peer_name=f"resident + {COPIES} x copy of misses",
                bar=1.0,
                misses_per_token=statistics.median(misses),
                copy_ms_per_block=MS * statistics.median(figures["copy"]),
                resident_ms_per_token=MS * statistics.median(figures["resident"]),
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
    if engine.manager.counters[True].misses:
        raise RuntimeError("a budget of 100 % missed experts that an equal run loaded")
    return float(np.median(run.step_s))


def _fused_s(engine, prompts, steps: int, cold: bool) -> tuple[float, float]:
    """Mean seconds and misses of a step.

    Args:
      cold: empties the slots before the prompt; otherwise the run before, an equal
        one, has filled them.
    """
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


STUDY = speed_study(
    "offload",
    "How close does offloaded decoding come to what link, compute and memory allow?",
    offload_rows,
    offload_models,
    settings=OffloadSettings,
)
