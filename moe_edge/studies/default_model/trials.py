"""Trains trials of some shapes, one after another, and measures each."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from moe_edge.evaluate.texts import find_file
from moe_edge.metrics.frames import Rows
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


def measure(settings: ShapeSettings, rows: Rows) -> None:
    """All trials, and what real models' traces show of the same."""
    work, texts = Path(settings.work_dir), Path(settings.data_dir)
    work.mkdir(parents=True, exist_ok=True)
    load_corpus(work, texts, VOCABULARY, TASK_CHARACTERS, settings.seed)
    parameters = {}
    for name in settings.shapes:
        trial = run_trial(settings, name, work)
        tell_trial(rows, name, trial, settings.margins)
        parameters[name] = trial.parameters
    for name in settings.traces:
        path = Path(find_file(name, settings.data_dir))
        weights_TK = read_trace(path, settings.trace_experts).weights_TK
        weights_TK = weights_TK[(weights_TK > 0).all(axis=1)]
        shares_TK = weights_TK / weights_TK.sum(axis=1, keepdims=True)
        tell_trace(rows, path.name.split(".")[0], shares_TK, settings.margins)
    rows.about |= {
        "model": {
            "name": "trials of the default model",
            "params": parameters,
            "weights": "trained here",
        },
        "workload": dataclasses.asdict(settings)
        | {"trace_sha256": _hashes(settings), "wanted_fall": list(WANTED_FALL)},
        "seeds": [settings.seed],
    }


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


def tell_trial(rows: Rows, name: str, one: Trial, margins: Sequence[float]) -> None:
    """Adds what a shape gave."""
    text, weights, halves = one.text, one.weights, one.halves
    rows(
        "shapes",
        name,
        loss=text.loss,
        half_cost=text.half_cost,
        usage_ratio=text.usage_ratio,
        fall=weights.fall,
        gain=halves.gain,
        own=halves.own,
        fixed=halves.fixed,
        independent=halves.independent,
        parameters=one.parameters,
        tokens_per_s=one.tokens_per_s,
    )
    for at, a in enumerate(margins):
        found = {"top": weights.top_A, "alternatives": weights.alternatives_A}
        found |= {"seen": weights.seen_top_A}
        rows("margins", name, a, **{key: of_A[at] for key, of_A in found.items()})


def tell_trace(
    rows: Rows, name: str, weights_TK: np.ndarray, margins: Sequence[float]
) -> None:
    """Adds what a trace of a real model shows of the same, weights best first."""
    by_rank_K = weights_TK.mean(axis=0)
    rows("shapes", name, fall=float(by_rank_K[0] / by_rank_K[-1]))
    for a, share in zip(margins, seen_top(weights_TK, margins), strict=True):
        rows("margins", name, a, seen=share)


def _hashes(settings: ShapeSettings) -> dict[str, str]:
    paths = {name: find_file(name, settings.data_dir) for name in settings.traces}
    return {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for name, path in paths.items()
    }
