"""CoServe, figures 13 to 17 and 19, live at reduced size: a tenth of the times."""

import dataclasses
from collections.abc import Sequence

from moe_edge.core.checks import check_known, check_positive
from moe_edge.schedule.coe_recipes import RECIPES, chosen_recipes
from moe_edge.studies.coserve.entry import OURS, PAPER, SAMBA
from moe_edge.studies.settings import RULES, StudySettings
from moe_edge.workload.coe_tasks import DECAY, TASKS

__all__ = ["OURS", "PAPER", "SAMBA", "LiveSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveSettings(StudySettings):
    """What live studies and the suite are told.

    Attributes:
      tasks: of the paper; policies: that are run in every round, the first one is what
        others are compared with; once: in the first round only.
      repeats: rounds; seed: of boards and requests; decay: of the frequencies.
      graph: a `coe.json` with weights for all tasks; None: boards of the tasks with
        random weights.
      memory: of GPU and CPU, such as 2MB,4MB; None: that of preset `reduced`.
      most_types, most_requests: no more of a task, for short runs.
      work_dir: where boards are written and kept, 130 MB; None: a temporary folder.
    """

    rules = RULES | {
        "tasks": lambda name, value: check_known("task", value, TASKS),
        "policies": lambda name, value: check_known("policy", value, RECIPES),
        "once": lambda name, value: chosen_recipes(",".join(value)),
        "decay": check_positive,
    }
    tasks: Sequence[str] = tuple(TASKS)
    policies: Sequence[str] = (SAMBA, PAPER, OURS)
    once: Sequence[str] | None = ("samba_no_tier",)
    repeats: int = 3
    seed: int = 0
    decay: float = DECAY
    graph: str | None = None
    memory: str | None = None
    most_types: int = 1000
    most_requests: int = 100_000
    work_dir: str | None = None
