"""MoE-Prism, figures 10 and 11: throughput and latency over K and batch, resident.

The original has one candidate for each number of whole experts; `operating_points.py`
says which K count.
"""

import functools
import time
from typing import Any

import numpy as np

from moe_edge.bench.prompts import make_pool
from moe_edge.bench.rounds import measure_rounds
from moe_edge.engine.generate import generate
from moe_edge.metrics.frames import Rows, Tables, counted, ranging
from moe_edge.papers.moe_prism.studies import making, models, quality
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.operating_points import (
    ERRORS,
    GAIN,
    LEAST,
    StepTimes,
    operating_points,
)
from moe_edge.papers.moe_prism.studies.studies import Fig10Settings


def measure(settings: Fig10Settings, rows: Rows) -> None:
    """Times every K and batch, interleaved: the original and one refactored model."""
    settings = making.make_models(settings)
    paths = dict(list(settings.checkpoints().items())[:2])
    compared = quality.Compared.load(paths)
    tokenizer = compared.parent.tokenizer
    texts, sources = quality.read_tokens(settings, tokenizer)
    engines = compared.at(settings.k_values)
    perplexity = {
        key: quality.measure(e, texts).perplexity for key, e in engines.items()
    }
    widest, count = max(settings.batches), settings.rounds + 1
    pool = make_pool(settings, tokenizer, widest * count, settings.prompt_tokens)
    warm, *rounds = pool.batches([widest] * count)
    times = measure_rounds(
        {
            (*key, batch): functools.partial(median_step, e, batch, settings.new_tokens)
            for key, e in engines.items()
            for batch in settings.batches
        },
        rounds,
        warm=[warm],
        num_compiled=lambda: sum(engine.num_compiled() for engine in engines.values()),
    )
    found = StepTimes(times.figures, perplexity)
    tell(rows, found)
    rows.checks |= times.checks()
    rows.files["steps.json"] = found.to_json()
    workload = {
        "prompts": list(pool.sources),
        "texts": sources,
        "sub_experts": compared.sub_experts,
    }
    models.tell(rows, settings, compared.model, workload)


def median_step(engine, batch: int, new_tokens: int, prompts) -> float:
    """Seconds of the median decode step of a batch: one late step changes nothing."""
    stamps: list[float] = []

    def stamp(row: int, token: int) -> None:
        if row == 0:
            stamps.append(time.perf_counter())

    generate(engine, prompts[:batch], new_tokens, on_token=stamp)
    return float(np.median(np.diff(stamps)))


def tell(rows: Rows, times: StepTimes) -> None:
    """Adds steps, and two standard errors of a difference of times at each batch."""
    for (who, k, batch), rounds_s in times.step_s.items():
        # The number that picture, answer and operating points show: not the median.
        value = times.seconds(who, k, batch)
        step = ranging(value, rounds_s, scale=1e3)
        rate = counted(batch / value, len(rounds_s))
        rows("times", who, k, batch, tpot_ms=step, rate=rate)
    for (who, k), value in times.perplexity.items():
        rows("quality", who, k, perplexity=value)
    for batch in dict.fromkeys(batch for *_, batch in times.step_s):
        rows("errors", batch, error=ERRORS * times.error(batch))


def derive(tables: Tables) -> dict[str, Any]:
    """Operating points by model and batch: all, and those that rounds tell apart."""
    both = tables["times"].merge(tables["quality"], on=["model", "k"])
    error = tables["errors"].set_index("batch").error
    name = next(model for model in both.model if model != ORIGINAL)
    batches, ends, equal = [], [], []
    for batch, some in both.groupby("batch", sort=False):
        row: dict[str, Any] = {"batch": batch, "error": error[batch]}
        curves = {}
        for who, label in ((ORIGINAL, "few"), (name, "many")):
            one = some[some.model == who].sort_values("k")
            points = zip(one.tpot_ms, one.perplexity, strict=True)
            curves[who] = dict(zip(one.k, points, strict=True))
            row[label] = len(operating_points(curves[who]))
            apart = max(error[batch], LEAST)
            row[f"{label}_apart"] = len(operating_points(curves[who], apart))
        batches.append(row | {"ratio": row["many"] / max(row["few"], 1)})
        old, new = curves[ORIGINAL], curves[name]
        ends += [
            {"batch": batch, "k": k, "ms": new[k][0]} for k in (min(new), max(new))
        ]
        equal += [{"k": k, "batch": batch, "times": new[k][0] / old[k][0]} for k in old]
    return {
        "batches": batches,
        "ends": ends,
        "equal": equal,
        "least": LEAST,
        "gain": GAIN,
        "checks": {
            f"batch {batch}: {ERRORS:g} standard errors within {LEAST:.0%}": ok
            for batch, ok in (error <= LEAST).to_dict().items()
        },
    }
