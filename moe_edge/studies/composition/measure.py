"""Measures every method at every budget; what is done is kept and not done again."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_edge.bench.engines import describe_model
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.files import write_json
from moe_edge.core.json_reader import read_json
from moe_edge.core.progress import say
from moe_edge.engine.load import load_engine
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.layerwise import Cached, LayerwiseText, cut_tokens
from moe_edge.evaluate.stepwise import ForcedRun
from moe_edge.evaluate.texts import read_text, sha256_of
from moe_edge.metrics.results import Findings
from moe_edge.offload.evict_base import get_eviction
from moe_edge.offload.link import EmulatedLink
from moe_edge.route.base import get_route
from moe_edge.studies.composition.fronts import Point, findings, live_points
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
from moe_edge.studies.composition.variants import Variants
from moe_edge.workload.trace_reader import read_trace

TIMED = 96  # tokens of a row that steps are timed on
BASE = Variant()
PRUNED = [
    Variant(removed=r, by=by) for r in (0.25, 0.5) for by in ("reap", "frequency")
]


class Workshop:
    """The model, its variants, the text, and what has been measured so far."""

    def __init__(self, settings: ComposeSettings):
        self.settings = settings
        reader = open_checkpoint(settings.checkpoint)
        self.moe, self.layers = reader.config.moe, len(reader.config.moe_layers)
        self.record_bytes = reader.layout.num_bytes(reader.dtype)
        self.tokenizer = load_tokenizer(reader)
        path = settings.path(settings.text)
        ids = self.tokenizer.encode(read_text(path))
        self.tokens_NS = cut_tokens(ids, settings.tokens, settings.length)
        self.workload = _workload(settings, reader, path)
        digest = hashlib.sha256(json.dumps(self.workload).encode()).hexdigest()[:12]
        self.folder = Path(settings.work_dir) / digest
        (self.folder / "cases").mkdir(parents=True, exist_ok=True)
        self.variants = Variants(settings, self.folder)
        self.timed_rows = self.tokens_NS[:, :TIMED].tolist()
        self._loaded: dict[tuple, Any] = {}

    def done(self, name: str, measure: Callable[..., Any], *given) -> Any:
        """What `measure(*given)` gives, in JSON's types; kept under a name."""
        path = self.folder / "cases" / f"{_file_name(name)}.json"
        if not path.is_file():
            write_json(path, measure(*given))
        return read_json(path)

    def lookups(self, method: Method, share: float) -> Path:
        """The file of what a method looked up."""
        name = _file_name(f"{method.name} {share}")
        return self.folder / "lookups" / name / "trace.csv.gz"

    @functools.cached_property
    def reference(self) -> ForcedRun:
        """The model as it is; not run where all is measured already."""
        return self.plain_run(BASE, None).forced

    # What a variant is.

    def k_of(self, method: Method) -> int | None:
        """Experts (or sub-experts) that a token computes; None: the model's own."""
        if method.k_share == 1:
            return None
        return round(method.k_share * self.moe.top_k * method.variant.subs)

    def block_bytes(self, variant: Variant) -> int:
        reader = open_checkpoint(self.variants.folder(variant))
        return reader.layout.num_bytes(reader.dtype)

    def experts(self, variant: Variant) -> int:
        config = open_checkpoint(self.variants.folder(variant)).config
        return config.moe.num_experts

    def slots(self, method: Method, share: float) -> int | None:
        """Slots of each layer; None: what the budget leaves is no two slots."""
        left = (share - method.shadow) * self.moe.num_experts * self.record_bytes
        slots = int(left / self.block_bytes(method.variant) + 1e-9)
        if slots < 2:
            return None
        return min(slots, self.experts(method.variant))

    def text(self, variant: Variant, k: int | None) -> LayerwiseText:
        """The text before a variant; the last one is kept, with what it ran."""
        if (variant, k) not in self._loaded:
            folder = self.variants.folder(variant)
            engine = load_engine(folder, with_tokenizer=False).engine.at_k(k)
            self._loaded = {(variant, k): LayerwiseText(engine, self.tokens_NS)}
        return self._loaded[variant, k]

    def plain_run(self, variant: Variant, k: int | None):
        """The text by the model's own choices."""
        text = self.text(variant, k)
        if "plain" not in self._loaded:
            self._loaded["plain"] = text.run()
        return self._loaded["plain"]


def run(settings: ComposeSettings) -> Findings:
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
    steps, points = _steps(shop), []
    for method, share, found in said:
        given = shop, method, share, found["slots"], steps[method.name]
        points.append(Point(method=method, share=share, **found, **_times(*given)))
        say(points[-1].line())
    quality = {}
    for variant in (BASE, *PRUNED):
        name = f"quality of {variant.name}"
        quality[variant.name] = shop.done(name, _quality, shop, variant)
    live = []
    if chosen := live_points(points, settings):
        cases = {f"{n}": _live(shop, *one, steps) for n, one in enumerate(chosen)}
        named = [
            f"{p.method.name} {p.share} {case.link.bytes_per_s:.6g}"
            for (p, _), case in zip(chosen, cases.values(), strict=True)
        ]
        given = cases, shop.timed_rows, False
        found = shop.done(f"live {named}", measured_steps, *given)
        live = [(*one, *found[f"{n}"]) for n, one in enumerate(chosen)]
    return findings(settings, points, quality, live, _entry(shop), steps)


def _entry(shop: Workshop) -> dict[str, Any]:
    """`model` and `workload` of the entry."""
    loaded = load_engine(shop.settings.checkpoint, with_tokenizer=False)
    model = describe_model(loaded.name, loaded.engine.weights, loaded.dtype)
    how = {n: getattr(shop.settings, n) for n in ("live_cases", "processor_time")}
    return {"model": model, "workload": shop.workload | how}


def _workload(settings: ComposeSettings, reader, path: Path) -> dict[str, Any]:
    """What was measured; names the folder of finished cases, too."""
    elsewhere = {"work_dir", "data_dir", "live_cases", "link_factors", "shares"}
    elsewhere |= {"processor_time"}
    fields = dataclasses.asdict(settings).items()
    return {name: value for name, value in fields if name not in elsewhere} | {
        "text_sha256": sha256_of(path),
        "calibration_sha256": sha256_of(settings.path(settings.calibration)),
        "links": list(settings.link_factors),
        "path": str(reader.path.name),
    }


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
    found = shop.done(name, measured_steps, cases, shop.timed_rows, by_processor)
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


def link_of(shop: Workshop, factor: float, layer_s: float) -> EmulatedLink:
    """On which a bfloat16 record takes `factor` layers, and the latency."""
    rate = shop.record_bytes / (factor * layer_s)
    return EmulatedLink(rate, shop.settings.link_latency_s)


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


def _times(
    shop: Workshop, method: Method, share: float, slots: int, steps: Steps
) -> dict[str, Any]:
    """Its time over each link, and what it moves."""
    name, block = f"{method.name} {share}", shop.block_bytes(method.variant)
    links = {
        f"{f:g}": link_of(shop, f, steps.layer_s) for f in shop.settings.link_factors
    }
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
    return {"moved": moved, "moved_bytes": moved * block, "tpot_s": tpot_s}


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


def _live(shop: Workshop, point: Point, factor: float, steps) -> Timed:
    """A case for real time, over the emulated link."""
    method = point.method
    link = link_of(shop, factor, steps[method.name].layer_s)
    folder = shop.variants.folder(method.variant)
    return Timed(folder, method, point.slots, shop.k_of(method), link)


def _file_name(name: str) -> str:
    """A file for a case, told apart from others that read alike."""
    words = "".join(c if c.isalnum() else "_" for c in name)[:60]
    return f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
