"""MoE-Prism, figures 10 and 11: throughput and latency over K and batch, resident.

The original has one candidate for each number of whole experts; `operating_points.py`
says which K count.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism import models, quality
from moe_edge.studies.moe_prism.models import ORIGINAL
from moe_edge.studies.moe_prism.operating_points import (
    ERRORS,
    GAIN,
    StepTimes,
    operating_points,
)
from moe_edge.studies.prompts import PromptSettings, make_pool
from moe_edge.studies.rounds import measure_rounds
from moe_edge.studies.study import Claim, Findings, Study, median_and_spread

PAPER_RATIO = 4
CLAIM = Claim(
    source="MoE-Prism, section 6.3.2 and abstract: more than 4 times the operating "
    "points",
    paper={"operating points, ratio": PAPER_RATIO},
    why="The paper shows GPUs and whole vLLM batches; here a step of a tiny model on "
    "CPU cores, of which experts are a part only: time falls with K, but not in "
    "proportion. Small blocks cost the loop over blocks more than large ones.",
)
RULE = (
    "The rule for what counts as a point was changed after a first run (3 rounds of "
    "24 steps, half their range as noise, no least gain in perplexity), which gave 1.8 "
    "and 1.2 times the points."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig10Settings(quality.QualitySettings, PromptSettings):
    """What is timed; `QualitySettings` and `PromptSettings` name the rest.

    Attributes:
      batches: sequences that decode together.
    """

    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
    rounds: int = 15
    prompt_tokens: int = 48
    new_tokens: int = 64
    batches: Sequence[int] = (1, 8)

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("rounds", 2), ("new_tokens", 3)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected {least} or more: fewer "
                    "say nothing of how exact the times are"
                )


def run(settings: Fig10Settings) -> Findings:
    """Times every K and batch, interleaved: the original and one refactored model."""
    settings = models.make_models(settings)
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
    cases = {
        (*key, batch): functools.partial(median_step, e, batch, settings.new_tokens)
        for key, e in engines.items()
        for batch in settings.batches
    }
    times = measure_rounds(
        cases,
        rounds,
        warm=[warm],
        num_compiled=lambda: sum(engine.num_compiled() for engine in engines.values()),
    )
    return findings(
        Measured(list(paths)[1], StepTimes(times.figures), perplexity),
        model=compared.model,
        workload=models.workload_of(
            settings,
            prompts=list(pool.sources),
            texts=sources,
            sub_experts=compared.sub_experts,
        ),
        limits=[*settings.limits(), RULE],
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times and perplexities of a refactored model and of the original."""

    refactored: str
    times: StepTimes
    perplexity: Mapping[tuple[str, int], float]

    def curve(self, name: str, batch: int) -> dict[int, tuple[float, float]]:
        """K -> (seconds of a step, perplexity), by rising K."""
        return {
            k: (self.times.seconds(name, k, batch), self.perplexity[name, k])
            for k in self.times.ks(name, batch)
        }


def findings(found: Measured, *, model, workload, limits, checks) -> Findings:
    """The entry from what was measured."""
    batches, name = workload["batches"], found.refactored
    distinct = {batch: found.times.distinct(batch) for batch in batches}
    rows = [
        metric(
            "all",
            f"least difference of times that counts, relative, batch {batch}",
            least,
            "1",
        )
        for batch, least in distinct.items()
    ]
    for (who, k, batch), times in found.times.step_s.items():
        # The number that picture, answer and operating points show: not the median.
        value = found.times.seconds(who, k, batch)
        spread = median_and_spread(np.asarray(times) * 1e3)[1]
        at, n = f"K={k}, batch {batch}", len(times)
        rows.append(metric(who, f"TPOT, {at}", 1e3 * value, "ms", n, spread))
        rows.append(metric(who, f"throughput, {at}", batch / value, "tokens/s", n))
    for (who, k), value in found.perplexity.items():
        rows.append(metric(who, f"perplexity, K={k}", value, "1"))
    counts, ratios, answers, details, slower = {}, {}, [], [], []
    for batch in batches:
        old, new = found.curve(ORIGINAL, batch), found.curve(name, batch)
        for who, curve in ((ORIGINAL, old), (name, new)):
            count = len(operating_points(curve, distinct[batch]))
            counts[f"{who}, batch {batch}"] = count
            rows.append(metric(who, f"operating points, batch {batch}", count, "1"))
        few, many = counts[f"{ORIGINAL}, batch {batch}"], count
        ratio = many / max(few, 1)
        ratios[f"operating points, ratio, batch {batch}"] = round(ratio, 2)
        answers.append(f"{many} against {few} at batch {batch} ({ratio:.1f} times)")
        ends = [f"{1e3 * new[k][0]:.2f} ms at K = {k}" for k in (min(new), max(new))]
        details.append(
            f"Batch {batch}: TPOT {' to '.join(ends)}; two points differ by {ERRORS:g} "
            f"standard errors in time ({distinct[batch]:.1%}) and by {GAIN:.2%} in "
            "perplexity."
        )
        slower += [
            f"K={k} batch {batch} ({new[k][0] / old[k][0]:.2f}x)"
            for k in old
            if new[k][0] > old[k][0] * (1 + distinct[batch])
        ]
    return Findings(
        answer=f"Operating points, sub-experts against whole experts: "
        f"{', '.join(answers)}; paper {PAPER_RATIO} times.",
        details=[
            *details,
            f"Slower than the original at equal compute: "
            f"{', '.join(slower) or 'nowhere'}.",
            "Times are geometric means of the rounds' median steps.",
        ],
        model=model,
        workload=workload,
        metrics=rows,
        baselines=[ORIGINAL],
        checks=checks,
        limits=limits,
        ours=ratios,
        plot=lambda path: plot(path, found, batches),
        files={"steps.json": found.times.to_json()},
        summary={"operating_points": counts},
    )


def plot(path, found: Measured, batches: Sequence[int]) -> None:
    """Throughput and time per step over K, a column a batch size."""
    panels = []
    for is_rate in (True, False):
        for batch in batches:
            ks = found.times.ks(found.refactored, batch)
            series = {}
            for name in (found.refactored, ORIGINAL):
                curve = found.curve(name, batch)
                values = [curve[k][0] if k in curve else np.nan for k in ks]
                series[name] = [batch / v if is_rate else 1e3 * v for v in values]
            label = "tokens/s" if is_rate else "TPOT (ms)"
            x_label = "sub-experts a token K"
            panels.append(Panel(f"batch {batch}", label, ks, series, x_label=x_label))
    line_panels(
        path,
        panels,
        title="Speed over the number of sub-experts (original: whole experts)",
        columns=len(batches),
    )


STUDY = Study(
    name="moe_prism_fig10",
    question="How finely does K trade speed for quality (MoE-Prism, figs. 10 and 11)?",
    settings=Fig10Settings,
    measure=run,
    check=models.check_inputs,
    claim=CLAIM,
)
