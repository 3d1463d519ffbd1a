"""MoE-Prism, table 2 and figure 9: perplexity over the number of sub-experts."""

import dataclasses

import numpy as np

from moe_edge.engine.load import Loaded, load_engine
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.plain_text import read_plain_text
from moe_edge.evaluate.texts import find_path, sha256_of
from moe_edge.metrics.plots_panels import Panel, line_panels
from moe_edge.metrics.results import metric
from moe_edge.studies.moe_prism.settings import (
    CG,
    LG,
    LG_FT,
    ORIGINAL,
    ElasticSettings,
    active_neurons,
    log_interpolate,
)
from moe_edge.studies.quickstart.run import count_params
from moe_edge.studies.smoe.settings import Findings, claim

# Table 2, OLMoE: perplexity over the original's at as many active neurons.
PAPER = {
    CG: {12: 0.947, 16: 0.987, 20: 1.000, 24: 1.003},
    LG: {12: 0.999, 16: 1.000, 20: 0.999, 24: 1.000},
    LG_FT: {12: 0.934, 16: 0.976, 20: 0.995, 24: 1.004},
}
WHY = (
    "The paper's models have 1,024 to 6,144 neurons an expert, of which a token uses "
    "few; ours has 64, which are much less specialised, and four gate neurons would "
    "be a quarter of a sub-expert: they are counted as active here, as fractions of "
    "the original's neurons. Fine-tuning at the paper's rate hardly moves the default "
    "model's routers, for which whole experts are a local optimum; thirty times that "
    "rate made them worse at every K."
)
EXACT = 1e-4  # relative: LG at U k' against the parent, over summation order
WORSE = 5e-4  # relative: below, the third digit does not change


@dataclasses.dataclass(frozen=True)
class Point:
    """One model at one K: perplexity of every text together, and what it computes."""

    k: int
    neurons: float
    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))


def read_tokens(settings: ElasticSettings, tokenizer) -> tuple[list, list[dict]]:
    """Token ids of every text, cut to `max_tokens`, and {path, sha256}."""
    texts, sources = [], []
    for name in settings.texts:
        path = find_path(name, settings.data_dir)
        text = read_plain_text(path)
        # A token has one character at least; most have three.
        ids = tokenizer.encode(text[: 16 * settings.max_tokens])
        texts.append(ids[: settings.max_tokens])
        sources.append({"path": name, "sha256": sha256_of(path)})
    return texts, sources


def measure(engine, texts) -> Point:
    """Perplexity of an engine at its K."""
    found = [measure_perplexity(engine, ids) for ids in texts]
    return Point(
        engine.config.moe.top_k,
        active_neurons(engine.config),
        sum(one.nll for one in found),
        sum(one.tokens for one in found),
    )


def run(settings: ElasticSettings) -> tuple[dict, Findings]:
    """Measures every model at every K; returns the model and the findings."""
    paths = settings.checkpoints()
    parent = load_engine(paths.pop(ORIGINAL))
    texts, sources = read_tokens(settings, parent.tokenizer)
    points: dict[str, dict[int, Point]] = {ORIGINAL: {}}
    subs = 1
    for name, path in paths.items():
        engine = load_engine(path, with_tokenizer=False).engine
        subs, limit = engine.config.moe.sub_experts, engine.config.moe.max_top_k
        points[name] = {
            k: measure(engine.at_k(k), texts) for k in settings.k_values if k <= limit
        }
    for k in settings.k_values:
        if k % subs == 0 and k // subs <= parent.engine.config.moe.num_experts:
            points[ORIGINAL][k] = measure(parent.engine.at_k(k // subs), texts)
    return model_of(parent), findings(points, subs, sources, settings)


def model_of(loaded: Loaded) -> dict:
    """`model` of a results entry."""
    is_default = loaded.name == "default"
    return {
        "name": loaded.name,
        "params": count_params(
            loaded.engine.config, loaded.engine.weights.num_bytes, loaded.dtype
        ),
        "weights": "toy trained here" if is_default else "given",
    }


def ratios(points, name: str) -> dict[int, tuple[float, float | None]]:
    """K -> perplexity over the original's at the same K, and at as many neurons."""
    original = points[ORIGINAL]
    known = {point.neurons: point.perplexity for point in original.values()}
    found = {}
    for k, point in points[name].items():
        if k in original:
            level = log_interpolate(point.neurons, known)
            at_k = point.perplexity / original[k].perplexity
            found[k] = at_k, None if level is None else point.perplexity / level
    return found


def findings(points, subs: int, sources, settings: ElasticSettings) -> Findings:
    """The entry from what was measured."""
    rows, ours, worse, sentences, exact = [], {}, [], [], []
    for name, by_k in points.items():
        for k, point in by_k.items():
            at = f"K={k}"
            if name == ORIGINAL:
                at += f" (K'={k // subs})"
            rows.append(
                metric(name, f"perplexity, {at}", point.perplexity, "1", point.tokens)
            )
            rows.append(metric(name, f"active neurons, {at}", point.neurons, "1"))
        if name == ORIGINAL:
            continue
        found = ratios(points, name)
        ours[name] = {k: round(at_k, 4) for k, (at_k, _) in found.items()}
        for k, (at_k, level) in found.items():
            n = by_k[k].tokens
            rows.append(metric(name, f"ratio to the original, K={k}", at_k, "1", n))
            if level is not None:
                what = f"ratio at as many active neurons, K={k}"
                rows.append(metric(name, what, level, "1", n))
            if (level or at_k) > 1 + WORSE:
                worse.append(f"{name} K={k} ({level or at_k:.3f})")
            if name == LG:
                exact.append(abs(at_k - 1) < EXACT)
        shown = [k for k in (12, 16, 20, 24) if k in found]
        listed = []
        for k in shown:
            at_k, level = found[k]
            listed.append(f"K={k} {at_k:.3f}")
            if name == CG and level is not None:
                listed[-1] += f" ({level:.3f} neuron for neuron)"
        sentences.append(f"{name}: {', '.join(listed)}")
    checks = {}
    if exact:
        checks["LG equals the original at every K that U divides"] = all(exact)
    entry = {
        "question": "Do sub-experts lose less perplexity than whole experts at equal "
        "compute (MoE-Prism, table 2 and fig. 9)?",
        "answer": "Perplexity over the original's at equal K. "
        + "; ".join(sentences)
        + ". Worse than the original at as many active neurons: "
        + (", ".join(worse) or "none")
        + ".",
        "kind": "measured",
        "workload": {
            "texts": sources,
            "max_tokens": settings.max_tokens,
            "k_values": list(settings.k_values),
            "sub_experts": subs,
        },
        "metrics": rows,
        "baselines": [ORIGINAL],
        "checks": checks,
        "limits": settings.limits(),
        "paper_claim": claim(
            "MoE-Prism, table 2, OLMoE: perplexity over the original's by K",
            {name: PAPER[name] for name in ours},
            ours,
            settings.why(WHY),
        ),
    }
    return Findings(
        entry=entry,
        plot=lambda path: plot(path, points, settings),
        summary={
            "ratio": {name: ours[name] for name in ours},
            "perplexity": {
                name: {k: round(point.perplexity, 4) for k, point in by_k.items()}
                for name, by_k in points.items()
            },
        },
    )


def plot(path, points, settings: ElasticSettings) -> None:
    """Perplexity over K, and over active neurons for what is not the original."""
    ks = sorted(settings.k_values)
    series = {
        name: [by_k[k].perplexity if k in by_k else np.nan for k in ks]
        for name, by_k in points.items()
    }
    # A line breaks at a gap, and the original has points at multiples of U only.
    known = [k for k in ks if k in points[ORIGINAL]]
    relative = {}
    for name in points:
        if name != ORIGINAL:
            found = ratios(points, name)
            relative[name] = [found[k][0] if k in found else np.nan for k in known]
    panels = [
        Panel("all K", "perplexity", ks, series, x_label="sub-experts a token K"),
        Panel(
            "against the original",
            "perplexity ratio at equal K",
            known,
            relative,
            x_label="sub-experts a token K",
            level=("original", 1.0),
        ),
    ]
    line_panels(path, panels, title="Perplexity over the number of sub-experts")
