"""What quantising weights changes: a fidelity card against another checkpoint.

The quantised model and the one it was made from score the same forced tokens of the
same batches. Two controls stand beside it: half of the reference's experts, which puts
the numbers in scale, and the quantised model offloaded, which must agree with itself
resident in every bit.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.bench.fidelity.rows import card_rows, forced_rows
from moe_edge.bench.fidelity.study import (
    FidelitySettings,
    QuantisedSettings,
    room_of,
)
from moe_edge.bench.study import Findings
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.engine.load import Loaded, check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.evaluate.agreement import INTERVALS, compare
from moe_edge.evaluate.likelihood import Forced
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.evaluate.texts import read_text, sha256_of
from moe_edge.metrics.plots_panels import Panel, bounded, draw_panels

LIMITS = (
    "Teacher-forced: each prediction is made on the text itself, so differences do not "
    "grow along a text as they would in free generation.",
    "One model and one text.",
    "Agreement's interval takes tokens as independent (Wilson); that of the perplexity "
    "ratio resamples blocks of 32 tokens (bootstrap of paired differences).",
)


def run(settings: FidelitySettings, reference: str) -> Findings:
    """Measures a checkpoint against `reference`, both resident."""
    budgets = list(settings.offloads.values())
    middle = budgets[len(budgets) // 2]
    checkpoints = [settings.checkpoint]
    return _measure(settings, reference, checkpoints, middle, settings.rounded)


def run_kinds(settings: QuantisedSettings) -> Findings:
    """Quantises a checkpoint in several ways and measures each against it."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = []
        for kind in settings.kinds:
            folders.append(f"{temporary}/{kind}")
            convert_checkpoint(
                settings.checkpoint, folders[-1], expert_dtype=kind, progress=False
            )
            room = room_of(settings) | {"batch": settings.batch_sizes[0]}
            check_checkpoint(folders[-1], offload=settings.budget, **room)
        return _measure(settings, settings.checkpoint, folders, settings.budget)


def check_kinds(settings: QuantisedSettings) -> None:
    """Refuses a text, a checkpoint, or one whose experts have no whole blocks."""
    read_text(settings.path)
    check_checkpoint(settings.checkpoint)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in settings.kinds:
            options = {"expert_dtype": kind, "dry_run": True, "progress": False}
            convert_checkpoint(settings.checkpoint, f"{temporary}/{kind}", **options)


def _measure(
    settings: FidelitySettings | QuantisedSettings,
    reference: str,
    checkpoints: Sequence[str],
    budget: OffloadOptions,
    rounded: Mapping[str, str] = MappingProxyType({}),
) -> Findings:
    base, seed = load_engine(reference), settings.seed
    rows = forced_rows(settings, base.tokenizer)
    top_k = base.engine.config.moe.top_k
    half = base.engine.at_k(max(1, top_k // 2))
    expected, cards = {}, []
    for batch in settings.batch_sizes:
        expected[batch] = score_batches(base.engine, rows, batch)
        found = compare(score_batches(half, rows, batch), expected[batch], seed)
        name = f"{half.config.moe.top_k} of {top_k} experts"
        cards.append({"option": name, "control": True, "batch": batch, **vars(found)})
    size, stored = base.engine.config.vocab_size, _expert_bytes(base)
    models = {reference: describe_model(reference, base.engine.weights, base.dtype)}
    half = base = None  # the memory of one model at a time
    exact = True
    for checkpoint in checkpoints:
        loaded = load_engine(checkpoint, **rounded)
        if loaded.engine.config.vocab_size != size:
            raise ConfigError(
                f"{checkpoint} has a vocabulary of {loaded.engine.config.vocab_size}, "
                f"{reference} one of {size}; name what it was made from by --reference"
            )
        share, runs = _expert_bytes(loaded) / stored, {}
        for batch in settings.batch_sizes:
            runs[batch] = score_batches(loaded.engine, rows, batch)
            found = vars(compare(runs[batch], expected[batch], seed))
            option = {"option": _option(loaded, rounded), "control": False}
            cards.append({**option, "batch": batch, "bytes_share": share, **found})
        first = settings.batch_sizes[0]
        given = rows, runs[first], first, rounded
        exact &= _offloads_exactly(checkpoint, budget, *given)
        weights = loaded.engine.weights
        models[checkpoint] = describe_model(checkpoint, weights, loaded.dtype)
        loaded = weights = None
    return _findings(cards, models[settings.checkpoint], settings, reference, exact)


def _option(loaded: Loaded, rounded: Mapping[str, str]) -> str:
    parts = [f"experts in {loaded.dtype}"]
    if loaded.dense_kind:
        parts.append(f"all else in {loaded.dense_kind}")
    parts += [f"{name.replace('_', ' ')} in {kind}" for name, kind in rounded.items()]
    return ", ".join(parts)


def _expert_bytes(loaded: Loaded) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(loaded.engine.weights.experts))


def _offloads_exactly(
    checkpoint,
    budget: OffloadOptions,
    rows: Sequence[Forced],
    expected,
    batch: int,
    rounded: Mapping[str, str],
) -> bool:
    """Whether the engine of this budget gives the resident one's bits."""
    room = {"batch": batch, "capacity": max(len(row.ids) for row in rows)}
    given = {"offload": budget, "with_tokenizer": False, **room, **rounded}
    with load_engine(checkpoint, **given).engine as engine:
        scored = score_batches(engine, rows, batch).log_probs
    pairs = zip(scored, expected.log_probs, strict=True)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def _findings(
    cards: list[dict[str, Any]],
    model: dict[str, Any],
    settings: FidelitySettings | QuantisedSettings,
    reference: str,
    exact: bool,
) -> Findings:
    source = f"{settings.path.parent.name}/{settings.path.name}"
    half = cards[0]
    ours = [c for c in cards if not c["control"] and c["batch"] == half["batch"]]
    sizes = ("rows", "prompt_tokens", "forced_tokens")
    title = f"{settings.checkpoint}: {', '.join(card['option'] for card in ours)}"
    return Findings(
        answer="Agreement and perplexity ratio: "
        + "; ".join(_agreement(card) for card in (*ours, half))
        + ".",
        details=[
            f"Measured on {source}, batch {half['batch']}, against {reference}.",
            f"Of the experts' bytes: {', '.join(_share(card) for card in ours)}.",
        ],
        model=model,
        workload={
            "text": {"source": source, "sha256": sha256_of(settings.path)},
            **{name: getattr(settings, name) for name in sizes},
            "reference": reference,
            "batch_sizes": list(settings.batch_sizes),
        },
        metrics=[
            row
            for card in cards
            for row in card_rows(f"batch {card['batch']}: {card['option']}", card)
        ],
        limits=LIMITS,
        seeds=[settings.seed],
        baselines=["the checkpoint it was made from", "half the experts"],
        checks={"offloaded, it gives the bits of the resident engine": exact},
        plot=lambda path: plot(path, cards, title=title),
        files={"cards.json": json.dumps(cards, indent=1) + "\n"},
        summary={"cards": cards},
    )


def _agreement(card: dict[str, Any]) -> str:
    ratio = card["perplexity_ratio"]
    return f"{card['option']} {100 * card['agreement']:.1f} %, x{ratio:.3f}"


def _share(card: dict[str, Any]) -> str:
    return f"{card['option']} {100 * card['bytes_share']:.0f} %"


def plot(path: Path, cards: list[dict[str, Any]], *, title: str) -> None:
    """Agreement and perplexity ratio, a bar an option, a group a batch size."""
    batches = list(dict.fromkeys(card["batch"] for card in cards))
    panels = []
    for key, interval in INTERVALS.items():
        points = [
            (card["option"], batches.index(card["batch"]), card[key], card[interval])
            for card in cards
        ]
        x = [f"batch {batch}" for batch in batches]
        label = key.replace("_", " ")
        panels.append(Panel(label, label, x, **bounded(len(x), points)))
    draw_panels(path, panels, title=title)
