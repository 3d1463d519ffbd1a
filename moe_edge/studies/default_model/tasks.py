"""Which of its generators' tasks a model solves, and what is lost there.

Public sets say nothing of a model that answers them at chance. These questions it was
trained for, on other seeds; so a loss can show where it solves some.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Budget, Margin, Seed, StudySettings
from moe_edge.bench.study import Study
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Tables, frame

RESIDENT = "all experts"
SOLVED, FAMILIES_SOLVED = 0.5, 3  # the bar: so many families pass that share


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings(StudySettings):
    """What is asked of whom.

    Attributes:
      checkpoint: a model that was trained on the generators' tasks.
      questions: of each family.
      k: experts a token computes in place of the model's own number.
      margins: a of SMoE, with `budget` of the experts in slots.
    """

    checkpoint: str = "default"
    questions: int = 1000
    k: int = 3
    margins: Sequence[Margin] = (0.35, 0.6)
    budget: Budget = "25%"
    seed: Seed = 0


def check(settings: TaskSettings) -> None:
    """Refuses a number of experts that the model does not choose."""
    moe = open_checkpoint(settings.checkpoint).config.moe
    if moe is None or not settings.k < moe.top_k:
        own = "no experts" if moe is None else f"chooses {moe.top_k} experts a token"
        raise ConfigError(
            f"k is {settings.k}, and {settings.checkpoint} {own}; expected fewer of a "
            "model with experts"
        )


def derive(tables: Tables) -> dict[str, Any]:
    """What the model solves, and the bar of it."""
    answers = tables["answers"]
    solved = answers[answers.what == RESIDENT]
    passed = int((solved.right >= SOLVED).sum())
    bar = f"target: {FAMILIES_SOLVED} families pass {SOLVED:g}"
    return {
        "solved": solved,
        "lossy": answers[answers.what != RESIDENT],
        "checks": {bar: passed >= FAMILIES_SOLVED},
    }


FRAMES = {
    "answers": frame("family what", "right change"),
    "over_all": frame("what", "right change"),
}
STUDY = Study(
    "default_tasks",
    TaskSettings,
    later("studies.default_model.answers.measure"),
    FRAMES,
    derive,
    check=check,
)
