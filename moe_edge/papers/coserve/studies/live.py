"""CoServe, figures 13 to 17 and 19, live at reduced size: a tenth of the times."""

import dataclasses
from collections.abc import Sequence

from moe_edge.bench.registry import later
from moe_edge.bench.settings import RULES, StudySettings
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import check_known, check_positive
from moe_edge.papers.coserve.coe.machine import parse_executors
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES, chosen_recipes
from moe_edge.papers.coserve.studies.entry import OURS, OVER_SYSTEMS, PAPER, SAMBA
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, TASKS


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllPolicies(LiveSettings):
    """The size of figures 13 to 16."""

    once: Sequence[str] | None = (
        *("samba_no_tier", "samba_fifo", "samba_parallel"),
        *("none", "em", "em_ra"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executors(LiveSettings):
    """The size of figure 17.

    Attributes:
      executors: what is compared, such as gpu:3,cpu:1.
    """

    rules = LiveSettings.rules | {
        "executors": lambda name, value: parse_executors(value)
    }
    tasks: Sequence[str] = ("a1", "b1")
    policies: Sequence[str] = (PAPER,)
    once: Sequence[str] | None = None
    executors: Sequence[str] = (
        *("gpu:1", "gpu:2", "gpu:3", "gpu:4"),
        *("gpu:1,cpu:1", "gpu:2,cpu:1", "gpu:3,cpu:1", "gpu:4,cpu:1"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduling(LiveSettings):
    """The size of figure 19."""

    tasks: Sequence[str] = ("a1", "b1")
    policies: Sequence[str] = (PAPER, OURS)
    once: Sequence[str] | None = None
    repeats: int = 5


WHY = (
    "A tenth of the times, small networks on a processor, assumed frequencies; what a "
    "load from host memory costs Samba decides the ratios."
)
REDUCED = "Emulated at a tenth of the times, with other networks and frequencies."
STUDIES = {
    "coserve_fig13_live": Study(
        name="coserve_fig13_live",
        question="How much faster than Samba-CoE, live (CoServe, figures 13 to 16)?",
        settings=AllPolicies,
        measure=later("papers.coserve.studies.live_studies.measure_tasks"),
        claim=Claim(
            source="CoServe, sections 5.2 and 5.3, figures 13 to 16",
            paper={
                OVER_SYSTEMS: {"numa": "4.5-10.5", "uma": "4.6-12"},
                "switches, numa, b2": {"samba": 1060, "coserve": 65},
                "trend": "None < EM < EM+RA < CoServe",
            },
            why=WHY,
            not_comparable=REDUCED,
        ),
    ),
    "coserve_fig17_live": Study(
        name="coserve_fig17_live",
        question="How many executors pay, live (CoServe, figure 17)?",
        settings=Executors,
        measure=later("papers.coserve.studies.live_studies.measure_executors"),
        claim=Claim(
            source="CoServe, section 5.3, figure 17",
            paper={"best": {"task A": "3 GPU, 1 CPU", "task B": "4 GPU, 1 CPU"}},
            why="One disk makes loads wait for each other here, so more executors gain "
            "only where batches take longer than loads. " + WHY,
            not_comparable=REDUCED,
        ),
    ),
    "coserve_fig19": Study(
        name="coserve_fig19",
        question="What does scheduling cost (CoServe, figure 19)?",
        settings=Scheduling,
        measure=later("papers.coserve.studies.live_scheduling.measure_scheduling"),
        claim=Claim(
            source="CoServe, section 5.3, figure 19",
            paper={
                "scheduling": "takes less than inference",
                "gap to inference scheduled in advance": "below 3 %",
                "management": "at most 0.2 % of the task's time",
            },
            why="Networks here take less than a millisecond an image, so the same "
            "decisions weigh more than beside a ResNet101.",
            not_comparable=REDUCED,
        ),
    ),
}
