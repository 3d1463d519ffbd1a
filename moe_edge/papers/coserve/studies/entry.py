"""What the entries of CoServe in computed time have in common."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from moe_edge.bench.settings import Positive, Seeds, known
from moe_edge.metrics.frames import Rows
from moe_edge.papers.coserve.coe.case import CoeWork
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.presets import PRESETS, SOURCE, get_preset
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, RECORD_BYTES, TASKS

SAMBA, PAPER, OURS = "samba", "coserve", "affinity"
SYSTEMS = ("samba", "samba_fifo", "samba_parallel")  # the paper's baselines
DISKS = {"one": "", "parallel": ", parallel loads"}  # how places are called
Task = Annotated[str, known("task", TASKS)]
Policy = Annotated[str, known("policy", RECIPES)]
MachineName = Annotated[str, known("machine", PRESETS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTasks(Seeds):
    """What all these studies can be told; seeds are of boards and requests.

    Attributes:
      tasks: of the paper; decay: of the frequencies of components, in types.
    """

    tasks: Sequence[Task] = tuple(TASKS)
    decay: Positive = DECAY

    def cases(
        self,
        task: str,
        preset: str,
        machine: Machine,
        decay: float | None = None,
        **options: Any,
    ) -> Iterator[CoeCase]:
        """A task on a machine, for every seed.

        Args:
          preset: for whose networks the board is.
          decay: another than that of the settings.
          **options: of `CoeCase`.
        """
        work = CoeWork(task=task, decay=self.decay if decay is None else decay)
        for seed in self.all_seeds:
            yield CoeCase(*work.build(preset, seed), machine, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnMachines(OnTasks):
    """As OnTasks, on machines and disks.

    Attributes:
      machines: presets.
      disks: one, whose loads wait for each other; parallel: they do not.
    """

    machines: Sequence[MachineName] = ("numa", "uma")
    disks: Sequence[Annotated[str, known("disk", DISKS)]] = tuple(DISKS)

    def places(self) -> Mapping[str, tuple[str, Machine]]:
        """How a machine with a disk is called -> its preset, and it."""
        return {
            name + DISKS[disk]: (
                name,
                dataclasses.replace(get_preset(name), one_disk=disk == "one"),
            )
            for name in self.machines
            for disk in self.disks
        }


def tell(rows: Rows, settings: OnTasks, baselines: Sequence[str] = ()) -> None:
    """What is said of runs in computed time."""
    rows.about |= {
        "model": {
            "name": ", ".join(RECORD_BYTES),
            "params": {name: size // 4 for name, size in RECORD_BYTES.items()},
            "weights": "none: sizes only",
        },
        "workload": dataclasses.asdict(settings) | {"hardware": SOURCE},
        "kind": "simulated",
        "cost_model_source": "preset",
        "seeds": settings.all_seeds,
        "baselines": list(baselines),
    }
