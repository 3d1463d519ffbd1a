"""CoServe, figures 13 to 17 and 19, live at reduced size: a tenth of the times."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Positive, Seed, StudySettings, by
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Frame, frame
from moe_edge.papers.coserve.coe.machine import parse_executors
from moe_edge.papers.coserve.schedule.coe_recipes import chosen_recipes
from moe_edge.papers.coserve.studies.entry import OURS, PAPER, SAMBA, Policy, Task
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, TASKS

Once = Annotated[Sequence[str], by(lambda each: chosen_recipes(",".join(each)))] | None


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

    tasks: Sequence[Task] = tuple(TASKS)
    policies: Sequence[Policy] = (SAMBA, PAPER, OURS)
    once: Once = ("samba_no_tier",)
    repeats: int = 3
    seed: Seed = 0
    decay: Positive = DECAY
    graph: str | None = None
    memory: str | None = None
    most_types: int = 1000
    most_requests: int = 100_000
    work_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Systems(LiveSettings):
    """The size of figures 13 and 14: a round of one start takes five minutes."""

    once: Once = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(LiveSettings):
    """The size of figures 15 and 16: Samba-CoE's other systems and CoServe's parts are
    slow, and run once."""

    once: Once = (
        *("samba_no_tier", "samba_fifo", "samba_parallel"),
        *("none", "em", "em_ra"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executors(LiveSettings):
    """The size of figure 17.

    Attributes:
      executors: what is compared, such as gpu:3,cpu:1.
    """

    tasks: Sequence[Task] = ("a1", "b1")
    policies: Sequence[Policy] = (PAPER,)
    once: Once = None
    executors: Sequence[Annotated[str, by(parse_executors)]] = (
        *("gpu:1", "gpu:2", "gpu:3", "gpu:4"),
        *("gpu:1,cpu:1", "gpu:2,cpu:1", "gpu:3,cpu:1", "gpu:4,cpu:1"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduling(LiveSettings):
    """The size of figure 19."""

    tasks: Sequence[Task] = ("a1", "b1")
    policies: Sequence[Policy] = (PAPER, OURS)
    once: Once = None
    repeats: int = 5


def _study(name: str, settings: type, functions: str, runs: Frame) -> Study:
    """A live study, whose functions stand in modules that load JAX."""
    module, _, what = functions.partition(".")
    here = f"papers.coserve.studies.{module}"
    measure, derive = (later(f"{here}.{step}_{what}") for step in ("measure", "derive"))
    return Study(name, settings, measure, {"runs": runs}, derive, start={"repeats": 1})


TASKS_FRAME = frame(
    "task policy",
    "throughput_per_s:requests/s time_s scheduling_ratio management_ratio switches "
    "time_over_computed switches_over_computed over_first",
)
RATES = frame("task executors", "throughput_per_s:requests/s computed_per_s:requests/s")
COSTS = frame("task policy", "gap scheduling_ms inference_ms ahead_ms management")
STUDIES = {
    name: _study(name, *given)
    for name, *given in (
        ("coserve_fig13_live", Systems, "live_studies.tasks", TASKS_FRAME),
        ("coserve_fig15_live", Parts, "live_studies.tasks", TASKS_FRAME),
        ("coserve_fig17_live", Executors, "live_studies.executors", RATES),
        ("coserve_fig19", Scheduling, "live_scheduling.scheduling", COSTS),
    )
}
