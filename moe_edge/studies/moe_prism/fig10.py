"""MoE-Prism, figures 10 and 11: throughput and latency over K and batch, resident.

The original has one candidate for each number of whole experts; `operating_points.py`
says which K count.
"""

import dataclasses
import time

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.load import load_engine
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism.operating_points import (
    ERRORS,
    GAIN,
    StepTimes,
    operating_points,
)
from moe_edge.studies.moe_prism.quality import measure, model_of, read_tokens
from moe_edge.studies.moe_prism.settings import LG, ORIGINAL, ElasticSettings
from moe_edge.studies.prompts import make_pool
from moe_edge.studies.smoe.settings import Findings, Settings, claim
from moe_edge.studies.study import median_and_spread

RULE = (
    "The rule for what counts as a point was changed after a first run (3 rounds of "
    "24 steps, half their range as noise, no least gain in perplexity), which gave 1.8 "
    "and 1.2 times the points."
)
WHY = (
    "The paper shows GPUs and whole vLLM batches; here a step of a tiny model on two "
    "CPU cores, of which experts are a part only: time falls with K, but not in "
    "proportion. Small blocks cost the loop over blocks more than large ones."
)


def prompt_settings(settings: ElasticSettings) -> Settings:
    """The part of the settings that the prompt pool reads."""
    return Settings(
        data_dir=settings.data_dir,
        sources=settings.sources,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
    )


def run(settings: ElasticSettings) -> tuple[dict, Findings]:
    """Times every K and batch, interleaved; returns the model and the findings."""
    for name, least in (("rounds", 2), ("new_tokens", 3)):
        if getattr(settings, name) < least:
            raise ConfigError(
                f"{name} is {getattr(settings, name)}, expected {least} or more: fewer "
                "say nothing of how exact the times are"
            )
    paths = settings.checkpoints()
    refactored = LG if LG in paths else next(n for n in paths if n != ORIGINAL)
    parent = load_engine(paths[ORIGINAL])
    sub = load_engine(paths[refactored], with_tokenizer=False).engine
    subs, limit = sub.config.moe.sub_experts, sub.config.moe.max_top_k
    texts, sources = read_tokens(settings, parent.tokenizer)
    engines = {(refactored, k): sub.at_k(k) for k in settings.k_values if k <= limit}
    for k in settings.k_values:
        if k % subs == 0 and k // subs <= parent.engine.config.moe.num_experts:
            engines[ORIGINAL, k] = parent.engine.at_k(k // subs)
    perplexity = {key: measure(e, texts).perplexity for key, e in engines.items()}

    widest = max(settings.batches)
    pool = make_pool(
        prompt_settings(settings),
        parent.tokenizer,
        widest * (settings.rounds + 1),
        settings.prompt_tokens,
    )
    warm, *rounds = pool.batches([widest] * (settings.rounds + 1))
    step_s = {(*key, batch): [] for key in engines for batch in settings.batches}
    for (name, k, batch), _ in step_s.items():
        warm_up(engines[name, k], warm[:batch], settings.new_tokens)
    compiled = sum(engine.num_compiled() for engine in engines.values())
    for number, prompts in enumerate(rounds):
        keys = list(step_s) if number % 2 == 0 else list(step_s)[::-1]
        for name, k, batch in keys:
            step_s[name, k, batch].append(
                median_step(engines[name, k], prompts[:batch], settings.new_tokens)
            )
    late = sum(engine.num_compiled() for engine in engines.values()) - compiled
    measured = Measured(refactored, subs, StepTimes(step_s), perplexity, late)
    workload = {
        "prompts": list(pool.sources),
        "texts": sources,
        "k_values": list(settings.k_values),
        "batches": list(settings.batches),
        "rounds": settings.rounds,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "sub_experts": subs,
    }
    return model_of(parent), findings(measured, workload, settings)


def median_step(engine, prompts, new_tokens: int) -> float:
    """Seconds of the median decode step of a batch: one late step changes nothing."""
    stamps: list[float] = []

    def stamp(row: int, token: int) -> None:
        if row == 0:
            stamps.append(time.perf_counter())

    generate(engine, prompts, new_tokens, on_token=stamp)
    return float(np.median(np.diff(stamps)))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times and perplexities of a refactored model and of the original."""

    refactored: str
    subs: int
    times: StepTimes
    perplexity: dict[tuple[str, int], float]
    compiled_late: int

    def curve(self, name: str, batch: int) -> dict[int, tuple[float, float]]:
        """K -> (seconds of a step, perplexity), by rising K."""
        return {
            k: (self.times.seconds(name, k, batch), self.perplexity[name, k])
            for k in self.times.ks(name, batch)
        }


def findings(found: Measured, workload: dict, settings: ElasticSettings) -> Findings:
    """The entry from what was measured."""
    rows, counts, sentences = [], {}, []
    distinct = {batch: found.times.distinct(batch) for batch in settings.batches}
    for batch, least in distinct.items():
        told = f"least difference of times that counts, relative, batch {batch}"
        rows.append(metric("all", told, least, "1"))
    for (name, k, batch), times in found.times.step_s.items():
        # The number that picture, answer and operating points show: not the median.
        value = found.times.seconds(name, k, batch)
        spread = median_and_spread(np.asarray(times) * 1e3)[1]
        at, n = f"K={k}, batch {batch}", len(times)
        rows.append(metric(name, f"TPOT, {at}", 1e3 * value, "ms", n, spread))
        rows.append(metric(name, f"throughput, {at}", batch / value, "tokens/s", n))
    for (name, k), value in found.perplexity.items():
        rows.append(metric(name, f"perplexity, K={k}", value, "1"))
    for batch in settings.batches:
        for name in (ORIGINAL, found.refactored):
            curve = found.curve(name, batch)
            counts[name, batch] = len(operating_points(curve, distinct[batch]))
            rows.append(
                metric(
                    name, f"operating points, batch {batch}", counts[name, batch], "1"
                )
            )
        old, new = counts[ORIGINAL, batch], counts[found.refactored, batch]
        ends = [found.curve(found.refactored, batch)[k][0] for k in _ends(found)]
        sentences.append(
            f"batch {batch}: {new} operating points against {old} "
            f"({new / max(old, 1):.1f} times; paper 4), TPOT {1e3 * ends[0]:.2f} ms at "
            f"K = {_ends(found)[0]} to {1e3 * ends[1]:.2f} ms at K = {_ends(found)[1]}"
        )
    slower = [
        f"K={k} batch {batch} ({new / old:.2f}x)"
        for batch in settings.batches
        for k, (old, _) in found.curve(ORIGINAL, batch).items()
        if (new := found.curve(found.refactored, batch)[k][0])
        > old * (1 + distinct[batch])
    ]
    least = ", ".join(f"{b}: {100 * d:.1f} %" for b, d in distinct.items())
    entry = {
        "question": "How finely does K trade speed for quality (MoE-Prism, figs. 10 "
        "and 11)?",
        "answer": f"{'; '.join(sentences)}. Two points differ by {ERRORS:g} standard "
        f"errors in time (batch {least}) and by {GAIN:.2%} in perplexity. Slower than "
        "the original at equal compute: " + (", ".join(slower) or "nowhere") + ".",
        "kind": "measured",
        "workload": workload,
        "metrics": rows,
        "baselines": [ORIGINAL],
        "checks": {"no program was compiled while measuring": not found.compiled_late},
        "limits": [*settings.limits(), RULE],
        "paper_claim": claim(
            "MoE-Prism, section 6.3.2 and abstract: more than 4 times the operating "
            "points",
            {"operating points, ratio": 4},
            {
                f"operating points, ratio, batch {batch}": round(
                    counts[found.refactored, batch] / max(counts[ORIGINAL, batch], 1), 2
                )
                for batch in settings.batches
            },
            settings.why(WHY),
        ),
    }
    return Findings(
        entry=entry,
        plot=lambda path: plot(path, found, settings),
        summary={
            "operating_points": {f"{n}, batch {b}": c for (n, b), c in counts.items()}
        },
        files={"steps.json": found.times.to_json()},
    )


def _ends(found: Measured) -> tuple[int, int]:
    """Smallest and largest K of the refactored model."""
    ks = [k for name, k in found.perplexity if name == found.refactored]
    return min(ks), max(ks)


def plot(path, found: Measured, settings: ElasticSettings) -> None:
    """Throughput and time per step over K, a column a batch size."""
    panels = []
    for is_rate in (True, False):
        for batch in settings.batches:
            ks = sorted(found.curve(found.refactored, batch))
            series = {}
            for name in (found.refactored, ORIGINAL):
                curve = found.curve(name, batch)
                values = [curve[k][0] if k in curve else np.nan for k in ks]
                series[name] = [batch / v if is_rate else 1e3 * v for v in values]
            label = "tokens/s" if is_rate else "TPOT (ms)"
            panels.append(
                Panel(
                    f"batch {batch}", label, ks, series, x_label="sub-experts a token K"
                )
            )
    line_panels(
        path,
        panels,
        title="Speed over the number of sub-experts (original: whole experts)",
        columns=len(settings.batches),
    )
