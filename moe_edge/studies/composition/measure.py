"""Measures every method at every budget; what is done is kept and not done again."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.bench.engines import describe_model
from moe_edge.core.progress import say
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.layerwise import Cached
from moe_edge.metrics.frames import Rows, interval, tables
from moe_edge.offload.evict_base import get_eviction
from moe_edge.route.base import get_route
from moe_edge.studies.composition.fronts import BASELINE, joined, live_cases
from moe_edge.studies.composition.methods import Method, Variant, methods
from moe_edge.studies.composition.quality import exact_match, questions
from moe_edge.studies.composition.settings import ComposeSettings
from moe_edge.studies.composition.times import (
    Steps,
    Timed,
    foreseen,
    measured_steps,
    moves,
    save_cut,
    time_of,
)
from moe_edge.studies.composition.workshop import BASE, Workshop, link_of
from moe_edge.workload.trace_reader import read_trace

PRUNED = [
    Variant(removed=r, by=by) for r in (0.25, 0.5) for by in ("reap", "frequency")
]


def run(settings: ComposeSettings, rows: Rows) -> None:
    """All methods, the quality of pruned models, and some cases in real time."""
    shop = Workshop(settings)
    ordered = sorted(methods(), key=lambda m: (m.variant.name, m.k_share))
    said = []
    for method, share in itertools.product(ordered, settings.shares):
        name = f"{method.name} {share}"
        found = shop.done(name, _fidelity, shop, method, share)
        if found is not None:
            said.append((method, share, found))
            say(f"{name}: perplexity x{found['ratio']:.4f}")
    steps = _steps(shop)
    for method, share, found in said:
        _tell(rows, shop, method, share, found, steps[method.name])
    for variant in (BASE, *PRUNED):
        name = f"quality of {variant.name}"
        found = shop.done(name, _quality, shop, variant)
        measured = {name: found[name] for name in ("exact_match", "questions")}
        ratio = interval(found["ratio"], found["interval"], found["tokens"])
        rows("quality", variant.name, ratio=ratio, **measured)
    _run_live(rows, shop, steps)
    loaded = load_engine(settings.checkpoint, with_tokenizer=False)
    how = {n: getattr(settings, n) for n in ("live_cases", "processor_time")}
    how["layer_s"] = next(iter(steps.values())).layer_s
    rows.about |= {
        "kind": "simulated",
        "model": describe_model(loaded.name, loaded.engine.weights, loaded.dtype),
        "workload": shop.workload | how,
        "seeds": [settings.seed],
        "baselines": [BASELINE, "each method alone"],
    }


def _tell(
    rows: Rows, shop: Workshop, method: Method, share: float, found, steps: Steps
) -> None:
    """A method at a budget."""
    times, budget = _times(shop, method, share, found["slots"], steps), f"{share:.0%}"
    for factor, tpot_s in times.tpot_s.items():
        rows("times", method.name, budget, factor, tpot_ms=1e3 * tpot_s)
    rows(
        *("points", method.name, method.family, method.variant.format, budget),
        slots=found["slots"],
        moved=times.moved,
        moved_kb=1e-3 * times.moved_bytes,
        ratio=interval(found["ratio"], found["interval"], found["tokens"]),
        agreement=found["agreement"],
    )
    each = ", ".join(f"{1e3 * tpot_s:.2f}" for tpot_s in times.tpot_s.values())
    say(f"{budget} {method.name}: {times.moved:.2f} moved, {each} ms")


def _run_live(rows: Rows, shop: Workshop, steps: dict[str, Steps]) -> None:
    """Some methods in real time, over the emulated link."""
    named = {m.name: m for m in methods() if not m.foresight}
    points = joined(tables(rows.stored()))
    chosen = live_cases(points, named, shop.settings.live_cases)
    if not chosen:
        return
    cases, shown = {}, []
    for number, row in enumerate(chosen):
        method = named[row["method"]]
        link = link_of(shop, row["link"], steps[method.name].layer_s)
        given = method, int(row["slots"]), shop.k_of(method), link
        cases[f"{number}"] = Timed(shop.variants.folder(method.variant), *given)
        shown.append(f"{method.name} {row['budget']} {link.bytes_per_s:.6g}")
    found = shop.timed(f"live {shown}", measured_steps, cases, shop.timed_rows, False)
    for number, row in enumerate(chosen):
        tpot_s, misses = found[f"{number}"]
        where = row["method"], row["budget"], row["link"]
        rows("live", *where, tpot_ms=1e3 * tpot_s, misses=misses)


def _steps(shop: Workshop) -> dict[str, Steps]:
    """Of every method: a step without misses, and what the host does for a miss.

    Strengths and pruning change neither. A policy costs a quantised model what it costs
    the bfloat16 one, over lru and the model's own choice.
    """
    lru, cases, chosen = methods()[0], {}, {}
    for method in methods():
        variant, k = _whole(method.variant), shop.k_of(method)
        folder, E = shop.variants.folder(variant), shop.experts(variant)
        at, policy = f"{variant.name}, {k}", f"{method.route}, {method.eviction}"
        chosen[method.name] = at, policy
        cases[f"{at}: here"] = Timed(folder, lru, E, k)
        cases[f"{at}: misses"] = Timed(folder, lru, max(2, E // 4), k)
        base_folder, base_E = shop.variants.folder(BASE), shop.experts(BASE)
        cases[policy] = Timed(base_folder, method, base_E, None)
    base = chosen[lru.name]
    by_processor = shop.settings.processor_time
    name = "steps" if by_processor else "steps by the clock"
    found = shop.timed(name, measured_steps, cases, shop.timed_rows, by_processor)
    steps, layer_s = {}, found[base[1]][0] / shop.layers
    for name, (at, policy) in chosen.items():
        (here_s, _), (step_s, misses) = found[f"{at}: here"], found[f"{at}: misses"]
        miss_s = max(0.0, step_s - here_s) / max(misses, 1e-9)
        more_s = max(0.0, found[policy][0] - found[base[1]][0])
        steps[name] = Steps(here_s + more_s, miss_s, layer_s)
    return steps


def _whole(variant: Variant) -> Variant:
    """The same without pruning, which changes no step whose experts are all there."""
    return Variant(variant.format, subs=variant.subs)


def _fidelity(shop: Workshop, method: Method, share: float) -> dict[str, Any] | None:
    """What a method at a budget says, and in a file beside it what it looked up."""
    slots = shop.slots(method, share)
    if slots is None:
        return None
    k = shop.k_of(method)
    if method.is_plain:
        found = shop.plain_run(method.variant, k)
    else:
        cached = Cached(get_eviction(method.eviction), slots)
        route = get_route(method.route, **method.options)
        found = shop.text(method.variant, k).run(route, cached)
    fidelity = compare(found.forced, shop.reference, shop.settings.seed)
    save_cut(shop.lookups(method, share), found.trace, shop.settings.timed_steps)
    return {
        "slots": slots,
        "ratio": fidelity.perplexity_ratio,
        "interval": list(fidelity.ratio_interval95),
        "agreement": fidelity.agreement,
        "tokens": fidelity.tokens,
    }


class Times(NamedTuple):
    """Of a method at a budget.

    Attributes:
      moved, moved_bytes: blocks and bytes a token; tpot_s: by link.
    """

    moved: float
    moved_bytes: float
    tpot_s: dict[float, float]


def _times(
    shop: Workshop, method: Method, share: float, slots: int, steps: Steps
) -> Times:
    """Its time over each link, and what it moves."""
    name, block = f"{method.name} {share}", shop.block_bytes(method.variant)
    links = {f: link_of(shop, f, steps.layer_s) for f in shop.settings.link_factors}
    path = shop.lookups(method, share)
    if method.foresight:
        name = f"oracle of {name} by {steps}"
        given = path, method, slots, block, list(links.values()), steps
        found = shop.done(name, _foreseen, *given)
        tpot_s, moved = dict(zip(links, found["tpot_s"], strict=True)), found["moved"]
    else:
        given = path, method, slots, block
        runs, moved = shop.done(f"moves of {name}", _moves, *given)
        tpot_s = {f: time_of(runs, moved, block, links[f], steps) for f in links}
    return Times(moved, moved * block, tpot_s)


def _moves(path: Path, *given) -> tuple[float, float]:
    return moves(read_trace(path), *given)


def _foreseen(path: Path, method, slots, block, links, steps) -> dict[str, Any]:
    trace = read_trace(path)
    given = trace, method, slots, block
    times, moved = zip(*(foreseen(*given, link, steps) for link in links), strict=True)
    return {"tpot_s": times, "moved": max(moved)}


def _quality(shop: Workshop, variant: Variant) -> dict[str, Any]:
    """Perplexity ratio and exact match of a checkpoint, resident."""
    settings = shop.settings
    found = compare(shop.plain_run(variant, None).forced, shop.reference, settings.seed)
    asked = questions(settings.questions, settings.seed)
    engine = shop.text(variant, None).engine
    return {
        "ratio": found.perplexity_ratio,
        "interval": list(found.ratio_interval95),
        "tokens": found.tokens,
        "exact_match": exact_match(engine, shop.tokenizer, asked),
        "questions": len(asked),
    }
