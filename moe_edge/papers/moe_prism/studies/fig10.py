"""MoE-Prism, figures 10 and 11: throughput and latency over K and batch, resident.

The original has one candidate for each number of whole experts; `operating_points.py`
says which K count.
"""

import functools
import time
from collections.abc import Sequence

import numpy as np

from moe_edge.bench.prompts import make_pool
from moe_edge.bench.rounds import measure_rounds
from moe_edge.bench.study import Findings, median_and_spread
from moe_edge.engine.generate import generate
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.moe_prism.studies import making, models, quality
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.operating_points import (
    ERRORS,
    GAIN,
    LEAST,
    StepTimes,
    operating_points,
)
from moe_edge.papers.moe_prism.studies.studies import PAPER_POINTS, Fig10Settings

RULE = (
    "What counts as a point was once taken from the rounds' scatter, so that more "
    f"rounds found more of them; now it is fixed: {LEAST:.0%} of time, {GAIN:.2%} of "
    "perplexity."
)


def run(settings: Fig10Settings) -> Findings:
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
    return findings(
        settings,
        StepTimes(times.figures, perplexity),
        model=compared.model,
        workload={
            "prompts": list(pool.sources),
            "texts": sources,
            "sub_experts": compared.sub_experts,
        },
        checks=times.checks(),
    )


def median_step(engine, batch: int, new_tokens: int, prompts) -> float:
    """Seconds of the median decode step of a batch: one late step changes nothing."""
    stamps: list[float] = []

    def stamp(row: int, token: int) -> None:
        if row == 0:
            stamps.append(time.perf_counter())

    generate(engine, prompts[:batch], new_tokens, on_token=stamp)
    return float(np.median(np.diff(stamps)))


def findings(settings: Fig10Settings, times: StepTimes, **given) -> Findings:
    """The entry from what was measured; `given`: more of `Findings`."""
    name = next(model for model in times.models if model != ORIGINAL)
    told = f"{ERRORS:g} standard errors of a difference of times, relative"
    errors = {batch: ERRORS * times.error(batch) for batch in settings.batches}
    rows = [
        metric("all", f"{told}, batch {batch}", error, "1")
        for batch, error in errors.items()
    ]
    checks = given.pop("checks") | {
        f"batch {batch}: {ERRORS:g} standard errors within {LEAST:.0%}": error <= LEAST
        for batch, error in errors.items()
    }
    for (who, k, batch), rounds_s in times.step_s.items():
        # The number that picture, answer and operating points show: not the median.
        value = times.seconds(who, k, batch)
        spread = median_and_spread(np.asarray(rounds_s) * 1e3)[1]
        at, n = f"K={k}, batch {batch}", len(rounds_s)
        rows.append(metric(who, f"TPOT, {at}", 1e3 * value, "ms", n, spread))
        rows.append(metric(who, f"throughput, {at}", batch / value, "tokens/s", n))
    for (who, k), value in times.perplexity.items():
        rows.append(metric(who, f"perplexity, K={k}", value, "1"))
    counts, ratios, answers, details, slower = {}, {}, [], [], []
    for batch, error in errors.items():
        old, new = times.curve(ORIGINAL, batch), times.curve(name, batch)
        few, many = (len(operating_points(curve)) for curve in (old, new))
        # As far as the rounds tell times apart: fewer, where they are too rough.
        apart = max(error, LEAST)
        few_apart, many_apart = (
            len(operating_points(curve, apart)) for curve in (old, new)
        )
        for who, number in ((ORIGINAL, few_apart), (name, many_apart)):
            row = f"operating points that rounds tell apart, batch {batch}"
            rows.append(metric(who, row, number, "1"))
        for who, count in ((ORIGINAL, few), (name, many)):
            counts[f"{who}, batch {batch}"] = count
            rows.append(metric(who, f"operating points, batch {batch}", count, "1"))
        ratio = many / max(few, 1)
        ratios[f"operating points, ratio, batch {batch}"] = round(ratio, 2)
        answers.append(f"{many}/{few} ({many_apart}/{few_apart}) at {batch}")
        ends = [f"{1e3 * new[k][0]:.2f} ms at K = {k}" for k in (min(new), max(new))]
        details.append(
            f"Batch {batch}: TPOT {' to '.join(ends)}; two points differ by "
            f"{LEAST:.0%} in time ({ERRORS:g} standard errors: {error:.1%}) and by "
            f"{GAIN:.2%} in perplexity."
        )
        slower += [
            f"K={k} batch {batch} ({new[k][0] / old[k][0]:.2f}x)"
            for k in old
            if new[k][0] > old[k][0] * (1 + LEAST)
        ]
    return models.findings(
        settings,
        answer=f"Operating points of sub-experts/whole experts {LEAST:.0%} apart (that "
        f"rounds tell apart), by batch: {', '.join(answers)}; paper {PAPER_POINTS} "
        "times as many.",
        details=[
            *details,
            f"Slower than the original at equal compute: "
            f"{', '.join(slower) or 'nowhere'}.",
            "Times are geometric means of the rounds' median steps.",
        ],
        metrics=rows,
        limits=[RULE],
        ours=ratios,
        plot=lambda path: plot(path, times, settings.batches),
        files={"steps.json": times.to_json()},
        checks=checks,
        summary={"operating_points": counts},
        **given,
    )


def plot(path, times: StepTimes, batches: Sequence[int]) -> None:
    """Throughput and time per step over K, a column a batch size."""
    panels = []
    for label, is_rate in (("tokens/s", True), ("TPOT (ms)", False)):
        for batch in batches:
            seconds = {
                (name, k): times.seconds(name, k, batch)
                for name in times.models
                for k in times.ks(name, batch)
            }
            shown = {
                key: batch / value if is_rate else 1e3 * value
                for key, value in seconds.items()
            }
            panels.append(quality.k_panel(f"batch {batch}", label, shown))
    draw_panels(
        path,
        panels,
        title="Speed over the number of sub-experts (original: whole experts)",
        columns=len(batches),
    )
