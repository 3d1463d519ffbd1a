"""Makes the models that MoE-Prism's studies compare, and refuses those that differ."""

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from typing import TypeVar

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import as_read_back, read_json
from moe_edge.core.typed import build_known
from moe_edge.evaluate.texts import find_file, read_text
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from moe_edge.papers.moe_prism.refactor.partition.solve import DEFAULT
from moe_edge.papers.moe_prism.refactor.run import run_refactor
from moe_edge.papers.moe_prism.refactor.settings import FINE_TUNED, GATES
from moe_edge.papers.moe_prism.studies.models import (
    BY_FIELD,
    KINDS,
    ORIGINAL,
    ModelSettings,
)
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.training.text import SOURCES, source_documents, split_documents

PROSE = ("wikitext", "wikipedia", "web", "books")
PIECE = 8000  # characters
END_OF_TEXT = "<|endoftext|>"
Settings = TypeVar("Settings", bound=ModelSettings)


def check_inputs(settings: ModelSettings) -> None:
    """Refuses models and texts that cannot be used, before anything is made.

    Raises:
      MoeEdgeError: see `check_models`; a text that is none.
      OSError: a file cannot be read.
    """
    if not settings.make:
        check_models(settings)
    for file in getattr(settings, "texts", ()):
        read_text(find_file(file, settings.data_dir))


def make_models(settings: Settings) -> Settings:
    """The settings with a path for each gate in `make`, made in `work_dir` if need be.

    What exists in the work folder is used again, and a run that was stopped goes on:
    each step is one of the project's own, which appears as a whole or resumes.

    Raises:
      MoeEdgeError: bad input, models that cannot be compared, or a fine-tuning that is
        not finished.
    """
    work = Path(settings.work_dir)
    if settings.make:
        _make_profile(work / "profile", settings)
    for field in settings.make:
        if not (work / field / "manifest.json").is_file():
            _refactor(work, field, settings)
    made = {field: str(work / field) for field in settings.make}
    settings = dataclasses.replace(settings, **made)
    check_models(settings)
    return settings


def _make_profile(folder: Path, settings: ModelSettings) -> None:
    """Profiles the parent unless that is done.

    Raises:
      OutputError: a profile of other settings, left by an earlier run.
    """
    hidden = any("calibrated" in field for field in settings.make)
    if not (folder / "profile.json").is_file():
        run_profile(
            out_dir=str(folder),
            checkpoint=settings.checkpoint,
            text=",".join(settings.calibration),
            data_dir=settings.data_dir,
            tokens=settings.calibration_tokens,
            hidden=hidden,
        )
    profile = open_profile(folder)
    profile.check(open_checkpoint(settings.checkpoint).content_sha256())
    if hidden:
        profile.check_hidden()
    tokens, wanted = profile.info["tokens"], settings.calibration_tokens
    # A text may be shorter, and equal shares are rounded down.
    if not wanted // 2 < tokens <= wanted:
        raise OutputError(
            f"{folder} holds a profile of {tokens} tokens, {wanted} are asked for; "
            "remove the folder or name another work_dir"
        )


def _refactor(work: Path, field: str, settings: ModelSettings) -> None:
    """Makes a refactored checkpoint."""
    if BY_FIELD[field].gate not in FINE_TUNED:
        return _run_refactor(work / field, work, field, settings)
    tuning = dict(settings.fine_tuning or {})
    if settings.rates:
        tuning["learning_rate"] = _best_rate(work, field, tuning, settings)
    _run_refactor(work / field, work, field, settings, tuning)


def _run_refactor(out: Path, work: Path, field: str, settings, tuning=None) -> None:
    kind = BY_FIELD[field]
    options = dict(kind.options)
    if tuning is not None:
        text = work / "train.txt"
        write_text(text, training_text(settings.data_dir))
        options |= {"train_text": str(text), "fine_tuning": tuning}
        options["teacher_kl"] = kind.follows
    run_refactor(
        out_dir=str(out),
        checkpoint=settings.checkpoint,
        profile=str(work / "profile"),
        gate=kind.gate,
        ppl_k="",
        **options,
    )


def _best_rate(work: Path, field: str, tuning: dict, settings: ModelSettings) -> float:
    """The rate of the lowest loss on held-out prose, mean over K, after short runs.

    Which rates there were, and their losses, stay in `FIELD_rates.json`; a rate with
    which the loss is no number loses.
    """
    facts = {
        "parent_sha256": open_checkpoint(settings.checkpoint).content_sha256(),
        "calibration_tokens": settings.calibration_tokens,
        "fine_tuning": tuning,
        "tokens": settings.rate_tokens,
    }
    path, facts = work / f"{field}_rates.json", as_read_back(facts)
    known = read_json(path, strict=False) if path.is_file() else {}
    losses = known["losses"] if known.get("facts") == facts else {}
    for rate in map(float, settings.rates):
        if str(rate) not in losses:
            losses[str(rate)] = _short_loss(work, field, tuning, rate, settings)
            write_text(path, json.dumps({"facts": facts, "losses": losses}, indent=1))
    return min(map(float, settings.rates), key=lambda rate: losses[str(rate)])


def _short_loss(work: Path, field: str, tuning: dict, rate: float, settings) -> float:
    """Nats on held-out prose after a short run, which is not kept."""
    out = work / f"{field}_rate"
    for left in (out, out.with_name(f"{out.name}.partition")):
        shutil.rmtree(left, ignore_errors=True)
    short = {"tokens": settings.rate_tokens, "learning_rate": rate}
    try:
        _run_refactor(out, work, field, settings, tuning | short)
    except ConfigError as error:
        if "finite" not in str(error):
            raise
        return math.inf
    report = read_json(out / "report.json")
    shutil.rmtree(out)
    after = report["fine_tuning"]["held_out_after"].values()
    return float(np.mean(np.log(list(after))))


def training_text(data_dir: str | None) -> str:
    """Prose for fine-tuning: what `moe-edge pretrain` reads of it.

    Its held-out parts stay out (`training.text.split_documents`). Documents are cut
    into pieces and shuffled, so that sources mix.

    Raises:
      ConfigError: no data folder.
    """
    if data_dir is None:
        raise ConfigError("fine-tuning reads text/ of the data; give --data_dir")
    pieces = [
        document[start : start + PIECE]
        for source in SOURCES
        if source.domain in PROSE
        for document in split_documents(source_documents(source, Path(data_dir)))[0]
        for start in range(0, len(document), PIECE)
    ]
    random.Random(0).shuffle(pieces)
    return END_OF_TEXT.join(pieces)


def _check_fine_tuned(folder: str, stored: dict, settings: ModelSettings) -> None:
    """Raises OutputError for a model fine-tuned otherwise, left by an earlier run."""
    options, path = dict(settings.fine_tuning or {}), Path(folder)
    if settings.rates:
        rate = _best_rate(path.parent, path.name, options, settings)
        options = options | {"learning_rate": rate}
    kinds = {"fine_tuning": FineTuning}
    wanted = build_known("settings", kinds, "fine_tuning", options)
    for name in ("steps", "learning_rate"):
        if stored[name] != getattr(wanted, name):
            raise OutputError(
                f"{folder} was fine-tuned with {name} {stored[name]}, "
                f"{getattr(wanted, name)} is asked for; remove the folder or name "
                "another work_dir"
            )


# Of a proxy gate, unless its kind says otherwise.
PROXY = {
    "gate_choice": "fitted",
    "proxy_rule": "global",
    "solver": DEFAULT,
    "weigh_neurons": True,
}


def _check_choice(name: str, path: str, refactor: dict) -> None:
    """Raises CheckpointError for a proxy gate made otherwise than its name says."""
    kind = KINDS[name]
    if kind.gate != "cg":
        return
    stored = dict(refactor.get("settings") or {})
    stored["solver"] = refactor.get("solver", DEFAULT)  # settings may leave it open
    for option, wanted in (PROXY | dict(kind.options)).items():
        if (found := stored.get(option, wanted)) != wanted:
            raise CheckpointError(
                f"{name} {path} has {option} {found}, expected {wanted}; name it as "
                "what it is"
            )


def check_models(settings: ModelSettings) -> None:
    """Refuses models that cannot be compared, before anything is loaded.

    Raises:
      CheckpointError: one that is not refactored, has another parent, another number
        of sub-experts than the others, or not the gate that its name says.
      OutputError: one of `make` that was fine-tuned with other settings.
    """
    paths = settings.checkpoints()
    parent = open_checkpoint(paths.pop(ORIGINAL)).content_sha256()
    all_subs = set()
    for name, path in paths.items():
        reader = open_checkpoint(path)
        moe, known = reader.config.moe, getattr(reader, "manifest", {})
        refactor = known.get("refactor") or {}
        if moe.sub_experts == 1:
            raise CheckpointError(
                f"{name} {path} is not refactored; make it with moe-edge refactor"
            )
        if refactor.get("parent_sha256") != parent:
            raise CheckpointError(
                f"{name} {path} was not made from {settings.checkpoint}; name the "
                "checkpoint it was made from"
            )
        tuned, kind = refactor.get("fine_tuned") or {}, KINDS[name]
        is_kind = moe.gate.startswith(GATES[kind.gate])
        is_kind &= bool(tuned) == (kind.gate in FINE_TUNED)
        if not is_kind or kind.follows != bool(tuned.get("teacher_kl")):
            how = "fine-tuned " if tuned else ""
            raise CheckpointError(
                f"{name} {path} has a {how}{moe.gate} gate; name it as what it is"
            )
        _check_choice(name, path, refactor)
        if tuned and kind.field in settings.make:
            _check_fine_tuned(path, tuned, settings)
        all_subs.add(moe.sub_experts)
    if len(all_subs) > 1:
        raise CheckpointError(
            f"the compared models have {sorted(all_subs)} sub-experts an expert, "
            "expected one number"
        )
