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
from typing import Any, NamedTuple

import numpy as np

from moe_edge.bench.cases import describe_link, linked
from moe_edge.bench.derived import over
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import make_pool
from moe_edge.bench.rounds import measure_rounds
from moe_edge.bench.study import mean_change
from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.metrics.frames import Rows, Tables, counted, median
from moe_edge.model.sub_experts import at_k
from moe_edge.papers.moe_prism.studies import making, models
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.quality import Point, read_tokens
from moe_edge.papers.moe_prism.studies.quality import measure as perplexity_of
from moe_edge.papers.moe_prism.studies.studies import Fig8Settings

MEASURES = {  # field of Step: measure, scale
    "tpot_s": ("tpot_ms", 1e3),
    "hit_ratio": ("hit_ratio", 1.0),
    "step_bytes": ("missed_mb", 1e-6),
}


class Step(NamedTuple):
    """A decode step of one round's generation; bytes are of misses."""

    tpot_s: float
    hit_ratio: float
    step_bytes: float


Case = tuple[str, int, str]  # model, level (K that is asked for), budget


def measure(settings: Fig8Settings, rows: Rows) -> None:
    """Times every service level under every budget."""
    settings = making.make_models(settings)
    paths = settings.checkpoints()
    name = list(paths)[1]
    with (
        Bench(paths[ORIGINAL], settings=settings) as parent,
        Bench(paths[name], settings=settings) as sub,
    ):
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
        link = parent.link_of(settings, layer_s)
        load_s = parent.load_seconds(link)
        perplexity = {
            (who, level): perplexity_of(benches[who].resident.at_k(k), texts)
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
            "link": describe_link(link, layer_s, settings, load_s),
        }
        tell(rows, steps.figures, perplexity, subs)
        rows.checks |= steps.checks()
        models.tell(rows, settings, parent.model, workload)
        rows.about["kind"] = "emulated" if link.emulated else "measured"


def _engine(bench: Bench, k: int, options: OffloadOptions) -> LayeredEngine:
    """A layered engine at K with slots of its own, on the bench's weights and store."""
    weights = dataclasses.replace(bench.weights, config=at_k(bench.config, k))
    options = dataclasses.replace(options, memory=bench.store.memory)
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


def tell(
    rows: Rows,
    steps: Mapping[Case, Sequence[Step]],
    perplexity: Mapping[tuple[str, int], Point],
    sub_experts: int,
) -> None:
    """Adds steps by case, one a round, and perplexities by model and level.

    A change is the mean over levels of the relative change of TPOT against the
    original, round by round.
    """
    for (who, level, budget), found in steps.items():
        given = {
            name: median([getattr(step, of) for step in found], scale=scale)
            for of, (name, scale) in MEASURES.items()
        }
        rows("levels", who, level / sub_experts, budget, **given)
    for (who, level), point in perplexity.items():
        value = counted(point.perplexity, point.tokens)
        rows("quality", who, level / sub_experts, perplexity=value)
    (name,) = {who for who, *_ in steps} - {ORIGINAL}
    changes: dict[tuple[str, str], list[list[float]]] = {}
    for who, level, budget in (case for case in steps if case[0] == name):
        kind = "between" if level % sub_experts else "at"
        pair = (steps[of, level, budget] for of in (ORIGINAL, who))
        change_R = [
            mean_change([(old.tpot_s, new.tpot_s)])
            for old, new in zip(*pair, strict=True)
        ]
        changes.setdefault((budget, f"{kind} whole experts"), []).append(change_R)
    for at, of_levels in changes.items():
        rows("changes", *at, change=median(np.mean(of_levels, axis=0)))


def derive(tables: Tables) -> dict[str, Any]:
    """Perplexity over the original's at the next whole number of experts."""
    quality = tables["quality"].astype({"experts": str})
    worse = over(quality, "perplexity", ORIGINAL, "experts", by="model")
    return {"worse": worse.astype({"experts": float})}
