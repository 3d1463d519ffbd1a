"""Suite `traced`: offloaded steps on the real link, routing from a recorded trace.

On a GPU: an OLMoE-shaped model of 7 B parameters and a DeepSeek-V2-Lite-shaped one of
16 B, experts in pinned host memory. On a CPU: one of 0.45 B, to try the suite.
"""

import functools
import gc
import statistics
from contextlib import ExitStack

import jax
import ml_dtypes
import numpy as np

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Rows, make_row, speed_study
from moe_edge.convert.families import config_from_hf
from moe_edge.evaluate.texts import find_file
from moe_edge.studies.speed import peers
from moe_edge.studies.speed.decode import (
    PROMPT_TOKENS,
    decode_rate,
    prefill_rate,
    rows_beside,
    weight_bytes,
)
from moe_edge.studies.speed.rates import device_bandwidth, link_rate
from moe_edge.studies.speed.traced_cases import (
    APART,
    PROMPT,
    STEPS,
    TRACE_EXPERTS,
    WAYS,
    Case,
    TracedSettings,
    cases_of,
    models,
    run_once,
)
from moe_edge.studies.speed.traced_model import TracedReader, trace_choices
from moe_edge.workload.trace_reader import read_trace

BAR = 1.25  # time of a step over its bound


def trace_path(settings: TracedSettings) -> str:
    """Of the trace. Raises OSError where it is not found."""
    return find_file(settings.trace, settings.data_dir)


def traced_rows(settings: TracedSettings, _work_dir) -> Rows:
    """Steps at 25 % and 50 %, layered and fused, against all resident; prefill at 50 %.

    `limit_fraction` of an offloaded row is its time over BAR times its bound: the
    larger of the resident engine's time and of the bytes that it missed at the measured
    rate of large copies. A better cache misses less, so bounds of policies differ. That
    of a resident row is the share of the time in which its weights can be read.
    """
    recorded = read_trace(trace_path(settings), num_experts=TRACE_EXPERTS)
    rates = {"link": link_rate(), "memory": device_bandwidth()}
    rows = []
    for name, hf_config in models(settings.shapes).items():
        config = config_from_hf(hf_config)
        chosen_SLK = trace_choices(recorded, config)
        reader = TracedReader(config, chosen_SLK, ml_dtypes.bfloat16)
        with ExitStack() as stack:
            cases = dict(cases_of(reader, stack, len(chosen_SLK), settings))
            run_once(cases, settings.threads)
            found = interleave(cases, settings.repeats)
            rows += _rows(name, cases, found, chosen_SLK, rates)
            rows += _beside_transformers(name, hf_config, cases, settings.repeats)
            del cases
        gc.collect()
    return rows


def _rows(name: str, cases: dict, found: dict, chosen_SLK, rates: dict) -> Rows:
    rows = []
    for (way, budget, batch), case in cases.items():
        runs = found[way, budget, batch]
        ours_ms, moved = [ms for ms, _ in runs], runs[-1][1]
        unit = "ms/step" if batch else "ms"
        where = f"traced/{name}/{case.label}/{way}"
        if way == "resident":
            row = make_row(where, ours_ms, unit)
            if batch:
                row |= _read_share(case, chosen_SLK, row["ours"], rates["memory"])
            rows.append(row)
            continue
        peer_ms = [ms for ms, _ in found["resident", "100%", batch]]
        steps = STEPS.get(batch, 1)
        step_bytes = moved["bytes_moved"] / steps
        missed_ms = MS * step_bytes / rates["link"]
        bound_ms = max(statistics.median(peer_ms), missed_ms)
        rows.append(
            make_row(
                f"{where}/{budget}",
                ours_ms,
                unit,
                peer=peer_ms,
                peer_name="all experts resident",
                limit=BAR * bound_ms,
                hit_ratio=moved["hit_ratio"],
                bytes_per_step=step_bytes,
                missed_ms=missed_ms,
                over_bound=statistics.median(ours_ms) / bound_ms,
                copy_bytes_per_s=rates["link"],
            )
        )
    return rows


def _read_share(case: Case, chosen_SLK, took_ms: float, rate: float) -> dict:
    """How much of a resident step reading its weights once would take."""
    weights, steps = case.engine.weights, STEPS[case.batch]
    rows_B, distinct = APART * np.arange(case.batch), 0
    for step in range(steps, 2 * steps):
        chosen_BLK = chosen_SLK[(rows_B + step) % case.vocabulary]
        distinct += sum(
            len(np.unique(chosen_BLK[:, layer])) for layer in weights.config.moe_layers
        )
    step_bytes = weight_bytes(weights, distinct / steps)
    return {
        "bytes_per_step": step_bytes,
        "bandwidth_bytes_per_s": rate,
        "limit_fraction": MS * step_bytes / rate / took_ms,
    }


def _beside_transformers(name: str, hf_config, cases: dict, repeats: int) -> Rows:
    """The resident engine beside a random `transformers` model of the same shape.

    Ours routes as the trace does, where tokens stand for its steps; the peer at random.
    """
    if jax.default_backend() == "cpu" or not peers.on_cuda():
        return []
    peer = peers.Transformers.random(hf_config)
    rng, rows = np.random.default_rng(0), []
    for batch in (*STEPS, 0):
        case = cases.get(("resident", "100%", batch))
        if case is None:
            continue
        steps = STEPS.get(batch, 0)
        shape = (batch, PROMPT_TOKENS) if batch else (1, PROMPT)
        prompts = rng.integers(0, case.vocabulary, shape)
        # Both read each token that they choose, ours beside the next step (`generate`).
        rate = functools.partial(decode_rate, case.engine, prompts, steps)
        if not batch:
            rate = functools.partial(prefill_rate, case.engine, prompts)
        named = f"traced/{name}/{case.label}/resident beside transformers"
        rows += rows_beside(named, repeats, rate, [peer], prompts, steps)
    return rows


def answer_of(rows: Rows) -> str:
    """Time over the bound, by mode; rates beside `transformers`."""
    parts = []
    for way in WAYS:
        if over := [r["over_bound"] for r in rows if f"/{way}/" in r["case"]]:
            parts.append(f"{way} {min(over):.2f} to {max(over):.2f}")
    found = (
        "Times over the larger of the resident engine's and their missed bytes at the "
        f"link's rate: {', '.join(parts)}."
    )
    ratios = [f"{row['ratio']:.1f}" for row in rows if "peer_build" in row]
    if ratios:
        found += f" Resident tokens/s over transformers': {', '.join(ratios)}."
    return found


LIMIT = (
    "Random weights: speed only, no quality claim. Routers repeat a recorded trace; "
    "tokens are known beforehand. Beside transformers ours begins the next step before "
    "it reads a token, as generate does; the peer waits for each."
)
STUDY = speed_study(
    "traced",
    "What does offloading cost a step on the real link, where routing repeats a "
    "recorded trace?",
    traced_rows,
    lambda settings, work_dir: [
        (name, config_from_hf(config))
        for name, config in models(settings.shapes).items()
    ],
    settings=TracedSettings,
    check=trace_path,
    limit=LIMIT,
    answer=answer_of,
)
