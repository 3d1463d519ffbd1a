"""Checkpoints of the study, made by the commands that users have, each once."""

from pathlib import Path

from moe_edge.checkpoint.manifest import MANIFEST_NAME
from moe_edge.convert.convert import convert_checkpoint
from moe_edge.core.files import write_text
from moe_edge.papers.moe_prism.refactor.run import run_refactor
from moe_edge.profile.run_profile import run_profile
from moe_edge.profile.run_prune import run_prune
from moe_edge.profile.writer import PROFILE_NAME
from moe_edge.studies.composition.methods import Variant
from moe_edge.studies.composition.settings import ComposeSettings
from moe_edge.training.generators import FAMILIES, documents

CHARACTERS = 4  # of a token, about
ROWS = 512  # of an expert's activations that the profile keeps


class Variants:
    """Folders below the working folder.

    Args:
      folder: of these settings; what is there is kept.
    """

    def __init__(self, settings: ComposeSettings, folder: Path):
        self._settings, self._folder = settings, folder

    def folder(self, variant: Variant) -> str:
        """The checkpoint of a variant, made if it is not there."""
        if variant == Variant():
            return self._settings.checkpoint
        folder = self._folder / variant.name
        if not (folder / MANIFEST_NAME).is_file():
            self._make(variant, str(folder))
        return str(folder)

    def _make(self, variant: Variant, folder: str) -> None:
        if variant.format != "bfloat16":
            source = Variant(removed=variant.removed, by=variant.by, subs=variant.subs)
            given = {"expert_dtype": variant.format, "progress": False}
            convert_checkpoint(self.folder(source), folder, **given)
            return
        given = {"checkpoint": self._settings.checkpoint, "profile": self._profile()}
        if variant.subs > 1:
            given |= {"sub_experts": variant.subs, "gate": "lg", "ppl_k": ""}
            run_refactor(out_dir=folder, **given)
        else:
            rule = {"remove": variant.removed, "by": variant.by}
            run_prune(out_dir=folder, **given, **rule)

    def _profile(self) -> str:
        """A profile of the calibration text and of the task families."""
        folder, settings = self._folder / "profile", self._settings
        if not (folder / PROFILE_NAME).is_file():
            tasks = self._folder / "tasks.txt"
            count = settings.calibration_tokens * CHARACTERS // len(FAMILIES)
            texts = [
                text
                for family in FAMILIES
                for text in documents(family, f"calibration-{settings.seed}", count)
            ]
            write_text(tasks, "\n\n".join(texts))
            run_profile(
                out_dir=str(folder),
                checkpoint=settings.checkpoint,
                text=f"text:{settings.path(settings.calibration)},tasks:{tasks}",
                tokens=2 * settings.calibration_tokens,
                max_tokens_per_expert=ROWS,
                seed=settings.seed,
            )
        return str(folder)
