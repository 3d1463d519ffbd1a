"""The models that MoE-Prism's studies compare: which they are, and how they are made.

ORIGINAL is the parent at k' of its experts; LG and LG-FT its sub-experts with a linear
gate before and after fine-tuning of the router; CG with a proxy gate and ours,
CALIBRATED, with rows that predict norms, both untrained. K counts sub-experts, so the
parent at k' computes as many neurons as the others at k' U.
"""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import (
    CheckpointError,
    ConfigError,
    OutputError,
    build_known,
    check_known,
)
from moe_edge.core.files import write_text
from moe_edge.evaluate.texts import find_file, read_text
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.refactor.run import run_refactor
from moe_edge.refactor.settings import GATES, FineTuning
from moe_edge.studies.settings import StudySettings
from moe_edge.studies.study import Findings
from moe_edge.training.text import SOURCES, source_documents, split_documents

ORIGINAL, LG, LG_FT, CG, CALIBRATED = "original", "LG", "LG-FT", "CG", "calibrated"
# Of the settings, in order of making.
FIELDS = {LG: "lg", CG: "cg", CALIBRATED: "calibrated", LG_FT: "lg_ft"}
PROSE = ("wikitext", "wikipedia", "web", "books")
PIECE = 8000  # characters
END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(StudySettings):
    """The part of a study's settings that says which models it compares.

    Attributes:
      checkpoint: the parent, path or `default`.
      lg, lg_ft, cg, calibrated: refactored checkpoints; None leaves one out.
      make: those of them to make, in `work_dir`, unless they are there: by a profile of
        `calibration_tokens` of `calibration`, and for lg_ft fine-tuning with options
        `fine_tuning` on the prose that the default model was trained on.
      data_dir: where relative paths are looked up too.
    """

    checkpoint: str = "default"
    lg: str | None = None
    lg_ft: str | None = None
    cg: str | None = None
    calibrated: str | None = None
    make: tuple[str, ...] = ()
    work_dir: str = "results/local/moe_prism"
    calibration: Sequence[str] = ("text/wikitext-2/train.txt", "text/c4_web.txt")
    calibration_tokens: int = 131_072
    fine_tuning: Mapping[str, Any] | None = None
    data_dir: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for gate in self.make:
            check_known("gate", gate, FIELDS.values())

    def limits(self) -> list[str]:
        """What is known of the default model and of no other."""
        if self.checkpoint != "default":
            return []
        return [
            "One tiny model, trained here on two CPU cores: experts of 64 neurons, of "
            "which a sub-expert has 16. Real models have 1,024 neurons an expert and "
            "more."
        ]

    def checkpoints(self) -> dict[str, str]:
        """Name -> path of the models that are compared, the parent first.

        Raises:
          ConfigError: no refactored one.
        """
        paths = {name: getattr(self, field) for name, field in FIELDS.items()}
        found = {
            name: paths[name] for name in (LG, LG_FT, CG, CALIBRATED) if paths[name]
        }
        if not found:
            raise ConfigError(
                "no refactored checkpoint given; name those of launch/refactor.py in "
                "lg, lg_ft, cg or calibrated, or list in `make` what to make"
            )
        return {ORIGINAL: self.checkpoint} | found


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
    for gate in settings.make:
        if not (work / gate / "manifest.json").is_file():
            _refactor(work, gate, settings)
    made = {gate: str(work / gate) for gate in settings.make}
    settings = dataclasses.replace(settings, **made)
    check_models(settings)
    return settings


def _make_profile(folder: Path, settings: ModelSettings) -> None:
    """Profiles the parent unless that is done.

    Raises:
      OutputError: a profile of other settings, left by an earlier run.
    """
    hidden = FIELDS[CALIBRATED] in settings.make
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


def _refactor(work: Path, gate: str, settings: ModelSettings) -> None:
    """Makes the refactored checkpoint of a gate."""
    options = {}
    if gate == "lg_ft":
        text = work / "train.txt"
        write_text(text, training_text(settings.data_dir))
        options["train_text"] = str(text)
        options["fine_tuning"] = dict(settings.fine_tuning or {})
    run_refactor(
        out_dir=str(work / gate),
        checkpoint=settings.checkpoint,
        profile=str(work / "profile"),
        gate=gate,
        ppl_k="",
        **options,
    )


def training_text(data_dir: str | None) -> str:
    """Prose for fine-tuning: what `launch/pretrain.py` reads of it.

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


def _check_fine_tuned(folder: str, stored: dict, options: Mapping | None) -> None:
    """Raises OutputError for a model fine-tuned otherwise, left by an earlier run."""
    kinds = {"fine_tuning": FineTuning}
    wanted = build_known("settings", kinds, "fine_tuning", options or {})
    for name in ("steps", "learning_rate"):
        if stored[name] != getattr(wanted, name):
            raise OutputError(
                f"{folder} was fine-tuned with {name} {stored[name]}, "
                f"{getattr(wanted, name)} is asked for; remove the folder or name "
                "another work_dir"
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
                f"{name} {path} is not refactored; make it with launch/refactor.py"
            )
        if refactor.get("parent_sha256") != parent:
            raise CheckpointError(
                f"{name} {path} was not made from {settings.checkpoint}; name the "
                "checkpoint it was made from"
            )
        is_tuned = bool(refactor.get("fine_tuned"))
        kind = GATES[FIELDS[name]]
        if not moe.gate.startswith(kind) or is_tuned != (name == LG_FT):
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


def provenance(settings: ModelSettings) -> dict:
    """How the compared models came about, from their reports, for the entry."""
    found = {}
    for gate in FIELDS.values():
        report = Path(getattr(settings, gate) or "") / "report.json"
        if getattr(settings, gate) and report.is_file():
            known = json.loads(report.read_text(encoding="utf-8"))
            kept = ("gate", "objective", "objective_heldout", "fine_tuning")
            found[gate] = {key: known[key] for key in kept if key in known}
            # A path of one machine.
            found[gate].get("fine_tuning", {}).pop("out_dir", None)
    return found


def findings(
    settings: ModelSettings, *, workload: Mapping, limits: Sequence[str] = (), **found
) -> Findings:
    """Findings with what all these studies say of their models.

    Args:
      settings: of the study; the entry's workload begins with its own ones.
      workload: what was read, of which size.
      limits: further ones.
      **found: of `Findings`.
    """
    models = {field.name for field in dataclasses.fields(ModelSettings)}
    own = {name: value for name, value in vars(settings).items() if name not in models}
    return Findings(
        workload=own | dict(workload) | {"refactored": provenance(settings)},
        limits=[*settings.limits(), *limits],
        **{"baselines": [ORIGINAL]} | found,
    )
