"""Makes the refactored models that a study compares: profile, gates, fine-tuning.

What exists in the work folder is used again, and a run that was stopped goes on: each
step is one of the project's own, which appears as a whole or resumes.
"""

import dataclasses
import json
import random
from pathlib import Path

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError, OutputError, build_known
from moe_edge.core.files import write_text
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.refactor.finetune.train import FineTuning
from moe_edge.refactor.run import run_refactor
from moe_edge.studies.moe_prism.settings import CG, LG_FT, ORIGINAL, ElasticSettings
from moe_edge.training.text import SOURCES, source_documents, split_documents

GATES = ("lg", "cg", "lg_ft")
PROSE = ("wikitext", "wikipedia", "web", "books")
PIECE = 8000  # characters
END_OF_TEXT = "<|endoftext|>"


def make_models(settings: ElasticSettings) -> ElasticSettings:
    """The settings with a path for each gate in `make`, made in `work_dir` if need be.

    Raises:
      MoeEdgeError: bad input, or a fine-tuning that is not finished.
    """
    if not settings.make:
        return settings
    work = Path(settings.work_dir)
    profile = work / "profile"
    if not (profile / "profile.json").is_file():
        run_profile(
            out_dir=str(profile),
            checkpoint=settings.checkpoint,
            text=",".join(settings.calibration),
            data_dir=settings.data_dir,
            tokens=settings.calibration_tokens,
        )
    _check_profile(profile, settings)
    found = {}
    for gate in settings.make:
        folder = work / gate
        if not (folder / "manifest.json").is_file():
            options = {}
            if gate == "lg_ft":
                text = work / "train.txt"
                write_text(text, training_text(settings.data_dir))
                options["train_text"] = str(text)
                options["fine_tuning"] = dict(settings.fine_tuning)
            run_refactor(
                out_dir=str(folder),
                checkpoint=settings.checkpoint,
                profile=str(profile),
                gate=gate,
                ppl_k="",
                **options,
            )
        found[gate] = str(folder)
    return dataclasses.replace(settings, **found)


def training_text(data_dir: str | None) -> str:
    """Prose for fine-tuning: what the default model's pretraining read of it.

    Its held-out parts stay out (`training.text.split_documents`). Documents are cut
    into pieces and shuffled, so that sources mix.

    Raises:
      ConfigError: no data folder.
    """
    if data_dir is None:
        raise ConfigError("fine-tuning reads text/ of the data; give --data_dir")
    pieces = []
    for source in SOURCES:
        if source.domain in PROSE:
            train, _ = split_documents(source_documents(source, Path(data_dir)))
            for document in train:
                pieces += [
                    document[start : start + PIECE]
                    for start in range(0, len(document), PIECE)
                ]
    random.Random(0).shuffle(pieces)
    return END_OF_TEXT.join(pieces)


def _check_profile(folder: Path, settings: ElasticSettings) -> None:
    """Raises OutputError for a profile of other settings, left by an earlier run."""
    profile = open_profile(folder)
    profile.check(open_checkpoint(settings.checkpoint).content_sha256())
    tokens, wanted = profile.info["tokens"], settings.calibration_tokens
    # A text may be shorter, and equal shares are rounded down.
    if not wanted // 2 < tokens <= wanted:
        raise OutputError(
            f"{folder} holds a profile of {tokens} tokens, {wanted} are asked for; "
            "remove the folder or name another work_dir"
        )


def _check_fine_tuned(folder: str, stored: dict, options: dict) -> None:
    """Raises OutputError for a model fine-tuned otherwise, left by an earlier run."""
    kinds = {"fine_tuning": FineTuning}
    wanted = build_known("settings", kinds, "fine_tuning", options)
    for name in ("steps", "learning_rate"):
        if stored[name] != getattr(wanted, name):
            raise OutputError(
                f"{folder} was fine-tuned with {name} {stored[name]}, "
                f"{getattr(wanted, name)} is asked for; remove the folder or name "
                "another work_dir"
            )


def check_models(settings: ElasticSettings) -> None:
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
                f"{name} {path} is not refactored; make it with launch/refactor.py"
            )
        if refactor.get("parent_sha256") != parent:
            raise CheckpointError(
                f"{name} {path} was not made from {settings.checkpoint}; name the "
                "checkpoint it was made from"
            )
        is_tuned = bool(refactor.get("fine_tuned"))
        if moe.has_proxy_gate != (name == CG) or is_tuned != (name == LG_FT):
            tuned = "fine-tuned " if is_tuned else ""
            raise CheckpointError(
                f"{name} {path} has a {tuned}{moe.gate} gate; name it as what it is"
            )
        if is_tuned and "lg_ft" in settings.make:
            _check_fine_tuned(path, refactor["fine_tuned"], settings.fine_tuning)
        all_subs.add(moe.sub_experts)
    if len(all_subs) > 1:
        raise CheckpointError(
            f"the compared models have {sorted(all_subs)} sub-experts an expert, "
            "expected one number"
        )


def provenance(settings: ElasticSettings) -> dict:
    """How the compared models came about, from their reports, for the entry."""
    found = {}
    for gate in GATES:
        path = getattr(settings, gate)
        report = None if path is None else Path(path) / "report.json"
        if report is not None and report.is_file():
            known = json.loads(report.read_text(encoding="utf-8"))
            found[gate] = {
                key: known[key]
                for key in ("gate", "objective", "objective_heldout", "fine_tuning")
                if key in known
            }
            # A path of one machine.
            found[gate].get("fine_tuning", {}).pop("out_dir", None)
    return found
