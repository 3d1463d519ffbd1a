"""MoE-Prism, figure 8: time per step under two memory budgets, experts offloaded.

A service level asks for the compute of so many experts, in quarters (with U = 4). The
original has to run the next whole number of experts and to move whole experts; the
refactored model runs and moves just as many sub-experts. Both run the offload manager
of section 5.2: LRU over blocks, misses copied asynchronously.
"""

import contextlib
import dataclasses

import numpy as np

from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.metrics.plots_panels import Panel, bar_panels
from moe_edge.metrics.results import metric
from moe_edge.model.sub_experts import at_k
from moe_edge.studies.cases import describe_link
from moe_edge.studies.engines import Bench
from moe_edge.studies.moe_prism.fig10 import prompt_settings
from moe_edge.studies.moe_prism.quality import measure, read_tokens
from moe_edge.studies.moe_prism.settings import LG, ORIGINAL, ElasticSettings
from moe_edge.studies.prompts import make_pool
from moe_edge.studies.smoe.settings import LIMITS as LINK_LIMITS
from moe_edge.studies.smoe.settings import Findings, claim
from moe_edge.studies.study import mean_change, median_and_spread

PAPER_CHANGE = -0.10  # section 6.2.3: about, at 16 GB and 24 GB
WHY = (
    "The paper compares 4.25 with 5 experts on PCIe, where bytes are all that counts, "
    "and gains from better packing as well (hit ratio .4375 to .4453 at 16 GB). Ours "
    "pays a latency for every transfer, and a sub-expert travels four times as often "
    "as a whole expert; a percentage budget leaves no fragment to pack."
)


@dataclasses.dataclass
class Timed:
    """What the rounds of a case gave, one entry a round; bytes are of misses."""

    tpot_s: list[float] = dataclasses.field(default_factory=list)
    hit_ratio: list[float] = dataclasses.field(default_factory=list)
    step_bytes: list[float] = dataclasses.field(default_factory=list)


Case = tuple[str, int, str]  # name, level (K that is asked for), budget


def run(settings: ElasticSettings) -> tuple[dict, Findings]:
    """Times every service level under every budget; returns model and findings."""
    paths = settings.checkpoints()
    name = LG if LG in paths else next(n for n in paths if n != ORIGINAL)
    with Bench(paths[ORIGINAL]) as parent, Bench(paths[name]) as sub:
        subs = sub.config.moe.sub_experts
        ks = {}
        for level in settings.k_values:
            ks[ORIGINAL, level], ks[name, level] = -(-level // subs), level
        benches = {ORIGINAL: parent, name: sub}
        for (who, _), k in ks.items():
            at_k(benches[who].config, k)  # refuses a level before anything is timed
        texts, sources = read_tokens(settings, parent.tokenizer)
        pool = make_pool(
            prompt_settings(settings),
            parent.tokenizer,
            2 * (settings.rounds + 1),
            settings.prompt_tokens,
        )
        past, *rounds, warm = pool.batches(
            [settings.rounds + 1, *[1] * settings.rounds, 1]
        )
        layer_s = parent.layer_seconds(past, settings.new_tokens, settings.rounds)
        link = parent.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )
        perplexity = {
            (who, level): measure(benches[who].resident.at_k(k), texts)
            for (who, level), k in ks.items()
        }
        timed: dict[Case, Timed] = {}
        late = 0
        for budget in settings.budgets:
            options = OffloadOptions(
                device_memory=budget,
                eviction="lru",
                link_bytes_per_s=link.bytes_per_s,
                link_latency_s=link.latency_s,
            )
            with contextlib.ExitStack() as stack:
                engines = {
                    (*case, budget): stack.enter_context(
                        _engine(benches[case[0]], k, options)
                    )
                    for case, k in ks.items()
                }
                late += _time_all(engines, rounds, warm, settings, timed)
        model = parent.model
    workload = {
        "prompts": list(pool.sources),
        "texts": sources,
        "levels": list(settings.k_values),
        "sub_experts": subs,
        "budgets": list(settings.budgets),
        "rounds": settings.rounds,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "link": describe_link(link, layer_s, settings),
    }
    found = Measured(name, subs, timed, perplexity, late)
    return model, findings(found, workload, settings)


def _engine(bench: Bench, k: int, options: OffloadOptions) -> LayeredEngine:
    """A layered engine at K with slots of its own, on the bench's weights and store."""
    weights = dataclasses.replace(bench.weights, config=at_k(bench.config, k))
    capacity = bench.config.max_positions
    return assemble(options, weights, bench.store, capacity=capacity)


def _time_all(engines, rounds, warm, settings: ElasticSettings, timed) -> int:
    """Times the engines in turn, round by round; programs compiled meanwhile."""
    for case, engine in engines.items():
        warm_up(engine, warm, settings.new_tokens)
        timed[case] = Timed()
    compiled = sum(engine.num_compiled() for engine in engines.values())
    for number, prompts in enumerate(rounds):
        cases = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for case in cases:
            engine, one = engines[case], timed[case]
            engine.reset_records()
            done = generate(engine, prompts, settings.new_tokens)
            missed = engine.manager.counters[True].misses
            missed_bytes = missed * engine.manager.queue.store.block_bytes
            one.tpot_s.append(done.decode_s / done.steps)
            one.hit_ratio.append(engine.movement()["hit_ratio"])
            one.step_bytes.append(missed_bytes / done.steps)
    return sum(engine.num_compiled() for engine in engines.values()) - compiled


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times by case, perplexities by name and level."""

    refactored: str
    subs: int
    timed: dict[Case, Timed]
    perplexity: dict
    compiled_late: int

    def tpot_s(self, name: str, level: int, budget: str) -> float:
        return float(np.median(self.timed[name, level, budget].tpot_s))


def findings(found: Measured, workload: dict, settings: ElasticSettings) -> Findings:
    """The entry from what was measured."""
    rows, name = [], found.refactored
    for (who, level, budget), one in found.timed.items():
        at = f"level {level / found.subs:g} experts, {budget}"
        for what, values, scale, unit in (
            ("TPOT", one.tpot_s, 1e3, "ms"),
            ("cache ratio", one.hit_ratio, 1, "1"),
            ("missed a step", one.step_bytes, 1e-6, "MB"),
        ):
            value, spread = median_and_spread(np.asarray(values) * scale)
            rows.append(metric(who, f"{what}, {at}", value, unit, len(values), spread))
    for (who, level), point in found.perplexity.items():
        at = f"level {level / found.subs:g} experts"
        value = point.perplexity
        rows.append(metric(who, f"perplexity, {at}", value, "1", point.tokens))
    worse = {
        f"{level / found.subs:g}": found.perplexity[name, level].perplexity
        / found.perplexity[ORIGINAL, level].perplexity
        for level in settings.k_values
    }
    change = {}
    for budget in settings.budgets:
        for between in (True, False):
            pairs = [
                (found.tpot_s(ORIGINAL, k, budget), found.tpot_s(name, k, budget))
                for k in settings.k_values
                if bool(k % found.subs) == between
            ]
            if pairs:
                kind = "between whole experts" if between else "at whole experts"
                change[f"{budget}, {kind}"] = round(mean_change(pairs), 3)
    for what, value in change.items():
        rows.append(metric(name, f"change of TPOT, {what}", value, "1"))
    entry = {
        "question": "Do sub-experts shorten offloaded decoding at a service level "
        "between whole experts (MoE-Prism, fig. 8)?",
        "answer": "Mean change of TPOT against the original: "
        + "; ".join(f"{what} {100 * value:+.0f} %" for what, value in change.items())
        + f" (paper about {100 * PAPER_CHANGE:.0f} %). Perplexity beside the "
        "original's at the next whole number of experts: "
        + ", ".join(f"{level} experts {ratio:.3f}" for level, ratio in worse.items())
        + ".",
        "kind": "emulated",
        "workload": workload,
        "metrics": rows,
        "baselines": [ORIGINAL],
        "checks": {"no program was compiled while measuring": not found.compiled_late},
        "limits": [*settings.limits(), *LINK_LIMITS[1:]],
        "paper_claim": claim(
            "MoE-Prism, section 6.2.3 and fig. 8: change of latency per step",
            {"16 GB": PAPER_CHANGE, "24 GB": PAPER_CHANGE},
            change,
            settings.why(WHY),
        ),
    }
    return Findings(
        entry=entry,
        plot=lambda path: plot(path, found, settings),
        summary={"tpot_change": change},
    )


def plot(path, found: Measured, settings: ElasticSettings) -> None:
    """TPOT by service level, a panel a budget."""
    panels = []
    for budget in settings.budgets:
        series, spreads = {}, {}
        for name in (ORIGINAL, found.refactored):
            medians = [
                median_and_spread(found.timed[name, k, budget].tpot_s)
                for k in settings.k_values
            ]
            series[name] = [1e3 * value for value, _ in medians]
            spreads[name] = [1e3 * spread[1] for _, spread in medians]
        levels = [f"{k / found.subs:g}" for k in settings.k_values]
        panels.append(
            Panel(
                f"{budget} of the experts on the device",
                "TPOT (ms)",
                levels,
                series,
                spreads,
                x_label="experts' worth of compute asked for",
            )
        )
    bar_panels(path, panels, title="Offloaded decoding, LRU, emulated link")
