"""MoE-Prism, figure 8: time per step under two memory budgets, experts offloaded.

A service level asks for the compute of so many experts, in quarters (with U = 4). The
original has to run the next whole number of experts and to move whole experts; the
refactored model runs and moves just as many sub-experts. Both run the offload machinery
of section 5.2: LRU over blocks, misses copied asynchronously.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.bench.cases import LIMITS, describe_link, linked
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import make_pool
from moe_edge.bench.rounds import (
    Rounds,
    measure_rounds,
    median_metric,
    median_panel,
)
from moe_edge.bench.study import Findings, mean_change
from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import metric
from moe_edge.model.sub_experts import at_k
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Point, measure, read_tokens
from moe_edge.papers.moe_prism.studies.studies import PAPER_CHANGE, Fig8Settings

MEASURES = {  # field of Step: name, scale, unit
    "tpot_s": ("TPOT", 1e3, "ms"),
    "hit_ratio": ("cache ratio", 1.0, "1"),
    "step_bytes": ("missed a step", 1e-6, "MB"),
}


class Step(NamedTuple):
    """A decode step of one round's generation; bytes are of misses."""

    tpot_s: float
    hit_ratio: float
    step_bytes: float


Case = tuple[str, int, str]  # model, level (K that is asked for), budget


def run(settings: Fig8Settings) -> Findings:
    """Times every service level under every budget."""
    settings = making.make_models(settings)
    paths = settings.checkpoints()
    name = list(paths)[1]
    with Bench(paths[ORIGINAL]) as parent, Bench(paths[name]) as sub:
        benches, subs = {ORIGINAL: parent, name: sub}, sub.config.moe.sub_experts
        ks = {(ORIGINAL, level): -(-level // subs) for level in settings.k_values}
        ks |= {(name, level): level for level in settings.k_values}
        for (who, _), k in ks.items():
            at_k(benches[who].config, k)  # refuses a level before anything is timed
        texts, sources = read_tokens(settings, parent.tokenizer)
        count = settings.rounds + 1
        pool = make_pool(settings, parent.tokenizer, 2 * count, settings.prompt_tokens)
        past, *rounds, warm = pool.batches([count, *[1] * count])
        layer_s = parent.layer_seconds(past, settings.new_tokens)
        link = parent.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )
        perplexity = {
            (who, level): measure(benches[who].resident.at_k(k), texts)
            for (who, level), k in ks.items()
        }
        lru = studied(eviction="lru")
        with contextlib.ExitStack() as stack:
            engines = {
                (who, level, budget): stack.enter_context(
                    _engine(benches[who], k, linked(lru, budget, link))
                )
                for budget in settings.budgets
                for (who, level), k in ks.items()
            }
            steps = measure_rounds(
                {
                    case: functools.partial(_step, engine, settings.new_tokens)
                    for case, engine in engines.items()
                },
                rounds,
                warm=[warm],
                num_compiled=lambda: sum(e.num_compiled() for e in engines.values()),
            )
        workload = {
            "prompts": list(pool.sources),
            "texts": sources,
            "sub_experts": subs,
            "link": describe_link(link, layer_s, settings),
        }
        found = Measured(name, steps, perplexity, subs)
        return findings(settings, found, parent.model, workload)


def _engine(bench: Bench, k: int, options: OffloadOptions) -> LayeredEngine:
    """A layered engine at K with slots of its own, on the bench's weights and store."""
    weights = dataclasses.replace(bench.weights, config=at_k(bench.config, k))
    capacity = bench.config.max_positions
    return assemble(options, weights, bench.store, capacity=capacity)


def _step(engine: LayeredEngine, new_tokens: int, prompts) -> Step:
    """One round of a case."""
    engine.reset_records()
    done = generate(engine, prompts, new_tokens)
    misses = engine.layer_step.counters[True].misses
    missed_bytes = misses * engine.queue.store.block_bytes
    hit_ratio = engine.movement()["hit_ratio"]
    return Step(done.decode_s / done.steps, hit_ratio, missed_bytes / done.steps)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Steps by case, one a round; perplexities by model and level; U."""

    refactored: str
    steps: Rounds[Case, Step]
    perplexity: Mapping[tuple[str, int], Point]
    sub_experts: int

    def rounds_of(self, measure: str, case: Case) -> list[float]:
        return [getattr(step, measure) for step in self.steps[case]]

    def experts(self, level: int) -> str:
        """A level in experts' worth of compute."""
        return f"{level / self.sub_experts:g}"

    def changes(self, levels: Sequence[int], budget: str) -> list[float]:
        """Mean relative change of TPOT against the original over levels, by round."""
        pairs = [
            zip(
                self.rounds_of("tpot_s", (ORIGINAL, level, budget)),
                self.rounds_of("tpot_s", (self.refactored, level, budget)),
                strict=True,
            )
            for level in levels
        ]
        return [mean_change(of_round) for of_round in zip(*pairs, strict=True)]


def findings(settings: Fig8Settings, found: Measured, model, workload) -> Findings:
    """The entry from what was measured."""
    name, levels = found.refactored, settings.k_values
    rows = [
        median_metric(
            who,
            f"{told}, level {found.experts(level)} experts, {budget}",
            found.rounds_of(measure, (who, level, budget)),
            unit,
            scale,
        )
        for who, level, budget in found.steps.figures
        for measure, (told, scale, unit) in MEASURES.items()
    ]
    for (who, level), point in found.perplexity.items():
        told = f"perplexity, level {found.experts(level)} experts"
        rows.append(metric(who, told, point.perplexity, "1", point.tokens))
    changes = {}
    for budget in settings.budgets:
        for between in (True, False):
            kept = [k for k in levels if bool(k % found.sub_experts) == between]
            if kept:
                kind = "between whole experts" if between else "at whole experts"
                changes[f"{budget}, {kind}"] = found.changes(kept, budget)
    for what, values in changes.items():
        rows.append(median_metric(name, f"change of TPOT, {what}", values, "1"))
    change = {what: round(float(np.median(v)), 3) for what, v in changes.items()}
    worse = []
    for level in levels:
        old, new = (found.perplexity[who, level].perplexity for who in (ORIGINAL, name))
        worse.append(f"{found.experts(level)} experts {new / old:.3f}")
    return models.findings(
        settings,
        answer="Median change of TPOT against the original: "
        + "; ".join(f"{what} {100 * value:+.0f} %" for what, value in change.items())
        + f" (paper about {100 * PAPER_CHANGE:.0f} %).",
        details=[
            "By round: "
            + "; ".join(
                f"{what} {100 * min(values):+.0f} to {100 * max(values):+.0f} %"
                for what, values in changes.items()
            )
            + ".",
            "Perplexity over the original's at the next whole number of experts: "
            + ", ".join(worse)
            + ".",
        ],
        kind="emulated",
        model=model,
        workload=workload,
        metrics=rows,
        checks=found.steps.checks(),
        limits=LIMITS[1:],
        ours=change,
        plot=lambda path: plot(path, settings, found),
        summary={"tpot_change": change},
    )


def plot(path, settings: Fig8Settings, found: Measured) -> None:
    """TPOT by service level, a panel a budget."""
    levels = settings.k_values
    panels = [
        median_panel(
            f"{budget} of the experts on the device",
            "TPOT (ms)",
            [found.experts(level) for level in levels],
            {
                who: [found.rounds_of("tpot_s", (who, k, budget)) for k in levels]
                for who in (ORIGINAL, found.refactored)
            },
            1e3,
            x_label="experts' worth of compute asked for",
        )
        for budget in settings.budgets
    ]
    draw_panels(path, panels, title="Offloaded decoding, LRU, emulated link")
