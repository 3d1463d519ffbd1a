"""MoE-Prism, figure 8: time per step under two memory budgets, experts offloaded.

A service level asks for the compute of so many experts, in quarters (with U = 4). The
original has to run the next whole number of experts and to move whole experts; the
refactored model runs and moves just as many sub-experts. Both run the offload manager
of section 5.2: LRU over blocks, misses copied asynchronously.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.metrics.plots_panels import bar_panels
from moe_edge.metrics.results import metric
from moe_edge.model.sub_experts import at_k
from moe_edge.studies.cases import LIMITS, LinkSettings, describe_link, linked
from moe_edge.studies.engines import Bench
from moe_edge.studies.moe_prism import models
from moe_edge.studies.moe_prism.models import ORIGINAL
from moe_edge.studies.moe_prism.quality import (
    Point,
    QualitySettings,
    measure,
    read_tokens,
)
from moe_edge.studies.prompts import make_pool
from moe_edge.studies.rounds import (
    ON_TIME,
    Rounds,
    measure_rounds,
    median_metric,
    median_panel,
)
from moe_edge.studies.study import Claim, Findings, Study, mean_change

PAPER_CHANGE = -0.10  # about, at 16 GB and 24 GB
CLAIM = Claim(
    source="MoE-Prism, section 6.2.3 and fig. 8: change of latency per step",
    paper={"16 GB": PAPER_CHANGE, "24 GB": PAPER_CHANGE},
    why="The paper compares 4.25 with 5 experts on PCIe, where bytes are all that "
    "counts, and gains from better packing as well (hit ratio .4375 to .4453 at "
    "16 GB). Ours pays a latency for every transfer, and a sub-expert travels four "
    "times as often as a whole expert; a percentage budget leaves no fragment to pack.",
)
MEASURES = (  # field of Step, name, scale, unit
    ("tpot_s", "TPOT", 1e3, "ms"),
    ("hit_ratio", "cache ratio", 1.0, "1"),
    ("step_bytes", "missed a step", 1e-6, "MB"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig8Settings(QualitySettings, LinkSettings):
    """What is timed; `QualitySettings` and `LinkSettings` name the rest.

    Attributes:
      k_values: service levels, in sub-experts a token.
      budgets: device memory of each case.
    """

    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl")
    prompt_tokens: int = 48
    k_values: Sequence[int] = (13, 16, 17, 21, 25)
    budgets: Sequence[str] = ("25%", "50%")


class Step(NamedTuple):
    """A decode step of one round's generation; bytes are of misses."""

    tpot_s: float
    hit_ratio: float
    step_bytes: float


Case = tuple[str, int, str]  # model, level (K that is asked for), budget


def run(settings: Fig8Settings) -> Findings:
    """Times every service level under every budget."""
    settings = models.make_models(settings)
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
        layer_s = parent.layer_seconds(past, settings.new_tokens, settings.rounds)
        link = parent.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )
        perplexity = {
            (who, level): measure(benches[who].resident.at_k(k), texts)
            for (who, level), k in ks.items()
        }
        steps: dict[Case, list[Step]] = {}
        late = 0
        for budget in settings.budgets:
            options = linked(OffloadOptions(eviction="lru"), budget, link)
            with contextlib.ExitStack() as stack:
                engines = {
                    (who, level, budget): stack.enter_context(
                        _engine(benches[who], k, options)
                    )
                    for (who, level), k in ks.items()
                }
                found = _time(engines, rounds, warm, settings.new_tokens)
            steps |= found.figures
            late += found.compiled_late
        workload = models.workload_of(
            settings,
            prompts=list(pool.sources),
            texts=sources,
            sub_experts=subs,
            link=describe_link(link, layer_s, settings),
        )
        limits = [*settings.limits(), *LIMITS[1:]]
        return findings(
            Measured(name, steps, perplexity),
            model=parent.model,
            workload=workload,
            limits=limits,
            checks={ON_TIME: not late},
        )


def _engine(bench: Bench, k: int, options: OffloadOptions) -> LayeredEngine:
    """A layered engine at K with slots of its own, on the bench's weights and store."""
    weights = dataclasses.replace(bench.weights, config=at_k(bench.config, k))
    capacity = bench.config.max_positions
    return assemble(options, weights, bench.store, capacity=capacity)


def _time(engines, rounds, warm, new_tokens: int) -> Rounds[Case, Step]:
    """Times the engines of one budget, interleaved."""
    cases = {
        case: functools.partial(_step, engine, new_tokens)
        for case, engine in engines.items()
    }

    def num_compiled() -> int:
        return sum(engine.num_compiled() for engine in engines.values())

    return measure_rounds(cases, rounds, warm=[warm], num_compiled=num_compiled)


def _step(engine: LayeredEngine, new_tokens: int, prompts) -> Step:
    """One round of a case."""
    engine.reset_records()
    done = generate(engine, prompts, new_tokens)
    misses = engine.manager.counters[True].misses
    missed_bytes = misses * engine.manager.queue.store.block_bytes
    hit_ratio = engine.movement()["hit_ratio"]
    return Step(done.decode_s / done.steps, hit_ratio, missed_bytes / done.steps)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Steps by case, one a round; perplexities by model and level."""

    refactored: str
    steps: Mapping[Case, Sequence[Step]]
    perplexity: Mapping[tuple[str, int], Point]

    def rounds_of(self, measure: str, case: Case) -> list[float]:
        return [getattr(step, measure) for step in self.steps[case]]

    def change(self, levels: Sequence[int], budget: str) -> float:
        """Mean relative change of the median TPOT against the original."""
        return mean_change(
            [
                tuple(
                    float(np.median(self.rounds_of("tpot_s", (who, level, budget))))
                    for who in (ORIGINAL, self.refactored)
                )
                for level in levels
            ]
        )


def findings(found: Measured, *, model, workload, limits, checks) -> Findings:
    """The entry from what was measured."""
    name, subs, levels = found.refactored, workload["sub_experts"], workload["k_values"]
    rows = [
        median_metric(
            case[0],
            f"{told}, level {case[1] / subs:g} experts, {case[2]}",
            found.rounds_of(measure, case),
            unit,
            scale,
        )
        for case in found.steps
        for measure, told, scale, unit in MEASURES
    ]
    for (who, level), point in found.perplexity.items():
        told = f"perplexity, level {level / subs:g} experts"
        rows.append(metric(who, told, point.perplexity, "1", point.tokens))
    change = {}
    for budget in workload["budgets"]:
        for between in (True, False):
            kept = [level for level in levels if bool(level % subs) == between]
            if kept:
                kind = "between whole experts" if between else "at whole experts"
                change[f"{budget}, {kind}"] = round(found.change(kept, budget), 3)
    for what, value in change.items():
        rows.append(metric(name, f"change of TPOT, {what}", value, "1"))
    worse = []
    for level in levels:
        old, new = (found.perplexity[who, level].perplexity for who in (ORIGINAL, name))
        worse.append(f"{level / subs:g} experts {new / old:.3f}")
    return Findings(
        answer="Mean change of TPOT against the original: "
        + "; ".join(f"{what} {100 * value:+.0f} %" for what, value in change.items())
        + f" (paper about {100 * PAPER_CHANGE:.0f} %).",
        details=[
            "Perplexity over the original's at the next whole number of experts: "
            + ", ".join(worse)
            + "."
        ],
        kind="emulated",
        model=model,
        workload=workload,
        metrics=rows,
        baselines=[ORIGINAL],
        checks=checks,
        limits=limits,
        ours=change,
        plot=lambda path: plot(path, found, workload),
        summary={"tpot_change": change},
    )


def plot(path, found: Measured, workload: Mapping) -> None:
    """TPOT by service level, a panel a budget."""
    levels = workload["k_values"]
    panels = [
        median_panel(
            f"{budget} of the experts on the device",
            "TPOT (ms)",
            [f"{level / workload['sub_experts']:g}" for level in levels],
            {
                who: [found.rounds_of("tpot_s", (who, k, budget)) for k in levels]
                for who in (ORIGINAL, found.refactored)
            },
            1e3,
            x_label="experts' worth of compute asked for",
        )
        for budget in workload["budgets"]
    ]
    bar_panels(path, panels, title="Offloaded decoding, LRU, emulated link")


STUDY = Study(
    name="moe_prism_fig8",
    question="Do sub-experts shorten offloaded decoding at a service level between "
    "whole experts (MoE-Prism, fig. 8)?",
    settings=Fig8Settings,
    measure=run,
    check=models.check_inputs,
    claim=CLAIM,
)
