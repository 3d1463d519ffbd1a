"""The quickstart as a study: the default model writes, is measured, runs offloaded."""

import dataclasses

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Seed, StudySettings
from moe_edge.bench.study import Study
from moe_edge.engine.load import check_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartSettings(StudySettings):
    """What is shown, and on how much text it is measured.

    Attributes:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      max_new_tokens: length of the story.
      characters: of each of the two held-out texts of a domain.
      seed: of the texts and of sampling.
    """

    checkpoint: str = "default"
    max_new_tokens: int = 64
    characters: int = 6000
    seed: Seed = 0


STUDY = Study(
    name="quickstart",
    question="Does the default model write text, and do its experts specialise?",
    settings=QuickstartSettings,
    measure=later("bench.quickstart.run.run"),
    check=lambda settings: check_checkpoint(settings.checkpoint),
)
