"""Trains trials of some shapes, one after another, and measures each."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from moe_edge.bench.study import Findings
from moe_edge.evaluate.texts import find_file
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.studies.default_model.premises import (
    Halves,
    Text,
    Weights,
    halves_of,
    held_out_scores,
    seen_top,
    text_of,
    weights_of,
)
from moe_edge.studies.default_model.shapes import (
    WANTED_FALL,
    ShapeSettings,
    parse_shape,
)
from moe_edge.training.export import export_hf, read_newest
from moe_edge.training.resume import CORPUS_FILE, FACTS_FILE
from moe_edge.training.run import (
    TOKENIZER_FILE,
    load_corpus,
    read_corpus,
    run_pretrain,
)
from moe_edge.workload.trace_reader import read_trace

TASK_CHARACTERS, VOCABULARY = 3_000_000, 4096


class Trial(NamedTuple):
    """What a shape gave; parameters: all, and those of a token."""

    text: Text
    weights: Weights
    halves: Halves
    parameters: int
    tokens_per_s: float


def run(settings: ShapeSettings) -> Findings:
    """All trials, and what real models' traces show of the same."""
    work, texts = Path(settings.work_dir), Path(settings.data_dir)
    work.mkdir(parents=True, exist_ok=True)
    load_corpus(work, texts, VOCABULARY, TASK_CHARACTERS, settings.seed)
    found = {name: run_trial(settings, name, work) for name in settings.shapes}
    traces = {}
    for name in settings.traces:
        path = Path(find_file(name, settings.data_dir))
        weights_TK = read_trace(path, settings.trace_experts).weights_TK
        weights_TK = weights_TK[(weights_TK > 0).all(axis=1)]
        shares_TK = weights_TK / weights_TK.sum(axis=1, keepdims=True)
        traces[path.name.split(".")[0]] = shares_TK
    return findings(settings, found, traces)


def run_trial(settings: ShapeSettings, name: str, work: Path) -> Trial:
    """Trains a shape unless that is done, and measures it."""
    folder = work / name.replace("/", "_").replace(" ", "_")
    run_dir, model = folder / "run", folder / "model"
    run_dir.mkdir(parents=True, exist_ok=True)
    for file in (CORPUS_FILE, FACTS_FILE, TOKENIZER_FILE):
        if not (run_dir / file).exists():
            (run_dir / file).hardlink_to(work / file)
    shape = parse_shape(name)
    done = run_pretrain(
        str(run_dir),
        data_dir=settings.data_dir,
        train_tokens=settings.train_tokens,
        decay_tokens=settings.train_tokens // 4,
        warmup_tokens=min(300_000, settings.train_tokens // 8),
        batch_tokens=settings.batch_tokens,
        balance=settings.balance,
        seed=settings.seed,
        **dataclasses.asdict(shape),
    )
    params, _, config = read_newest(run_dir)
    corpus = read_corpus(run_dir / CORPUS_FILE)
    tokenizer = Tokenizer.from_file(str(run_dir / TOKENIZER_FILE))
    export_hf(params, config, tokenizer, model, overwrite=True)
    run_profile(
        out_dir=str(folder / "profile"),
        checkpoint=str(model),
        text=",".join(settings.calibration),
        tokens=settings.calibration_tokens,
        data_dir=settings.data_dir,
        overwrite=True,
    )
    profile = open_profile(folder / "profile")
    scores = held_out_scores(params, config, corpus, settings.rows)
    return Trial(
        text_of(params, config, corpus, settings.rows),
        weights_of(scores, shape.top_k, settings.margins),
        halves_of(model, profile, settings.sub_experts, folder / "partition"),
        sum(int(array.size) for array in params.values()),
        done["tokens"] / done["seconds"],
    )


def chosen(found: Mapping[str, Trial]) -> str | None:
    """The shape of the lowest loss among those whose weights fall as real ones do."""
    low, high = WANTED_FALL
    real = [name for name, one in found.items() if low <= one.weights.fall <= high]
    return min(real, key=lambda name: found[name].text.loss, default=None)


def rows_of(name: str, one: Trial, margins) -> list[dict[str, Any]]:
    """Metric rows of a trial."""
    text, weights, halves = one.text, one.weights, one.halves
    rows = [
        metric(name, "held-out loss", text.loss, "nats/token"),
        metric(name, "perplexity lost with half of the experts", text.half_cost, "1"),
        metric(name, "usage between domains over within", text.usage_ratio, "1"),
        metric(name, "weight, first rank over last", weights.fall, "1"),
        metric(name, "norm, own half over fixed half", halves.gain, "1"),
        metric(name, "norm of the own half", halves.own, "1"),
        metric(name, "norm of the fixed half", halves.fixed, "1"),
        metric(name, "norm of the own half, independent", halves.independent, "1"),
        metric(name, "parameters", one.parameters, "1"),
        metric(name, "training speed", one.tokens_per_s, "tokens/s"),
    ]
    for at, a in enumerate(margins):
        rows += [
            metric(name, f"top-score share, a = {a:g}", weights.top_A[at], "1"),
            metric(name, f"alternatives, a = {a:g}", weights.alternatives_A[at], "1"),
            metric(name, f"seen top-score, a = {a:g}", weights.seen_top_A[at], "1"),
        ]
    return rows


def findings(
    settings: ShapeSettings,
    found: Mapping[str, Trial],
    traces: Mapping[str, np.ndarray],
) -> Findings:
    """The entry."""
    margins = settings.margins
    rows = [row for name, one in found.items() for row in rows_of(name, one, margins)]
    for name, weights_TK in traces.items():
        by_rank_K = weights_TK.mean(axis=0)
        fall = float(by_rank_K[0] / by_rank_K[-1])
        rows.append(metric(name, "weight, first rank over last", fall, "1"))
        for a, share in zip(margins, seen_top(weights_TK, margins), strict=True):
            rows.append(metric(name, f"seen top-score, a = {a:g}", share, "1"))
    best = chosen(found)
    answer = "No shape's weights fall as those of real models."
    if best is not None:
        one = found[best]
        answer = (
            f"{best}: weights fall {one.weights.fall:.2f} times, half of the experts "
            f"cost {one.text.half_cost:.1%}, a token's own half of sub-experts has "
            f"{one.halves.gain:.3f} times the norm of a fixed half."
        )
    low, high = WANTED_FALL
    return Findings(
        answer=answer,
        details=[
            f"{name}: loss {one.text.loss:.3f}, half of the experts "
            f"{one.text.half_cost:+.1%}, weights fall {one.weights.fall:.2f} times, "
            f"usage {one.text.usage_ratio:.1f}, halves {one.halves.gain:.3f}."
            for name, one in found.items()
        ],
        model={
            "name": "trials of the default model",
            "params": {name: one.parameters for name, one in found.items()},
            "weights": "trained here",
        },
        workload=dataclasses.asdict(settings)
        | {"trace_sha256": _hashes(settings), "wanted_fall": [low, high]},
        metrics=rows,
        limits=[
            "One seed a shape, and a small share of the tokens of a whole training.",
            "Traces hold the weights of the chosen only: their last rank stands for "
            "the best that was not chosen (rows `seen`); alternatives they have none.",
        ],
        seeds=[settings.seed],
        plot=lambda path: draw_panels(
            path, _panels(found, margins), title="Trials of shapes", columns=3
        ),
        summary={"chosen": best},
    )


def _hashes(settings: ShapeSettings) -> dict[str, str]:
    paths = {name: find_file(name, settings.data_dir) for name in settings.traces}
    return {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for name, path in paths.items()
    }


def _panels(found: Mapping[str, Trial], margins) -> list[Panel]:
    names = list(found)
    bars = {
        "held-out loss (nats)": lambda t: t.text.loss,
        "lost with half of the experts": lambda t: t.text.half_cost,
        "weight, first rank over last": lambda t: t.weights.fall,
        "norm, own half over fixed": lambda t: t.halves.gain,
    }
    panels = [
        Panel(title, "1", names, {"trial": [of(t) for t in found.values()]})
        for title, of in bars.items()
    ]
    for title, of in {
        "chosen that are top-score": lambda t: t.weights.top_A,
        "alternatives of a token": lambda t: t.weights.alternatives_A,
    }.items():
        series = {name: of(t).tolist() for name, t in found.items()}
        panels.append(Panel(title, "1", list(margins), series, x_label="a"))
    return panels
