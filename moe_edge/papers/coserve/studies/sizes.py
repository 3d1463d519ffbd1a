"""CoServe, figures 17 and 18 in computed time: how many executors, how many experts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.bench.derived import best
from moe_edge.bench.study import Study
from moe_edge.core.checks import CapacityError
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.coserve.coe.machine import Machine, parse_executors
from moe_edge.papers.coserve.coe.trial import TrialOptions, slide_window, with_executors
from moe_edge.papers.coserve.memory.coserve_memory import Window
from moe_edge.papers.coserve.studies.entry import PAPER, OnMachines, tell
from moe_edge.papers.coserve.workload.coe_tasks import CLASSIFIER, RECORD_BYTES

# An image of a batch needs 1.5 experts (section 3.3).
ITEM_BYTES = 3 * RECORD_BYTES[CLASSIFIER] // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executors(OnMachines):
    """The size of figure 17.

    Attributes:
      executors: what is compared, such as gpu:3,cpu:1.
    """

    executors: Sequence[str] = (
        *("gpu:1", "gpu:2", "gpu:3", "gpu:4"),
        *("gpu:1,cpu:1", "gpu:2,cpu:1", "gpu:3,cpu:1", "gpu:4,cpu:1"),
        *("gpu:2,cpu:2", "gpu:3,cpu:2"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(OnMachines):
    """The size of figure 18.

    Attributes:
      start: experts of the first window; margin: by which its line may be missed.
    """

    start: int = 15
    margin: float = 0.05


def check_executors(settings: Executors) -> None:
    """Refuses kinds of executors that the machines lack, or more than fit."""
    for name, machine in settings.places().values():
        for text in settings.executors:
            case = next(settings.cases(settings.tasks[0], name, with_(machine, text)))
            case.setup(PAPER)


def with_(machine: Machine, text: str) -> Machine:
    """A machine with other executors."""
    return with_executors(machine, parse_executors(text))


def measure_executors(settings: Executors, rows: Rows) -> None:
    """CoServe with every number of executors."""
    for place, (preset, machine) in settings.places().items():
        for task in settings.tasks:
            for text in settings.executors:
                cases = settings.cases(task, preset, with_(machine, text))
                found = of_seeds([case.run(PAPER).throughput_per_s for case in cases])
                rows("runs", place, task, text, throughput_per_s=found)
            print(f"{place}, {task}: served", flush=True)
    tell(rows, settings)


def derive_executors(tables: Tables) -> dict[str, Any]:
    """The best number of executors of each task."""
    found = best(tables["runs"], "throughput_per_s", "place task")
    return {"best": found[["place", "task", "executors"]]}


def with_images(machine: Machine) -> Machine:
    """The machine with images that need as much memory as the paper says."""
    gpu = {
        name: dataclasses.replace(one, item_bytes=ITEM_BYTES)
        for name, one in machine.devices["gpu"].items()
    }
    return dataclasses.replace(machine, devices={**machine.devices, "gpu": gpu})


def measure_memory(settings: Memory, rows: Rows) -> None:
    """Throughput at the ends of the windows, task by task, as the first seed slides."""
    for place, (preset, machine) in settings.places().items():
        for task in settings.tasks:
            by_number, window = slide(settings, task, preset, with_images(machine))
            ends = {"low": window.low, "high": window.high, "chosen": window.chosen}
            rows("windows", place, task, **ends)
            for experts, found in by_number.items():
                rate = of_seeds(found)
                rows("runs", place, task, experts, throughput_per_s=rate)
            print(f"{place}, {task}: {ends}", flush=True)
    tell(rows, settings)


def derive_memory(tables: Tables) -> dict[str, Any]:
    """The least and the largest number of experts that windows stop at, by place."""
    by_place = tables["windows"].groupby("place", sort=False)
    return {
        "spans": by_place.agg(low=("low", "min"), high=("high", "max")).reset_index()
    }


def slide(
    settings: Memory, task: str, preset: str, machine: Machine
) -> tuple[dict[int, list[float]], Window]:
    """Throughput of every seed by experts in GPU memory, and where their window stops.

    Raises:
      CapacityError: the GPU has no room for one expert beside a batch.
    """
    found: list[list[float]] = []

    def throughput(changed: Machine) -> float:
        cases = settings.cases(task, preset, changed)
        found.append([case.run(PAPER).throughput_per_s for case in cases])
        return float(np.median(found[-1]))

    graph = next(settings.cases(task, preset, machine)).graph
    trying = TrialOptions(window_start=settings.start, window_margin=settings.margin)
    window = slide_window(machine, graph, throughput, trying)
    if window is None:
        raise CapacityError(f"{preset} has no room for an expert beside a batch")
    tried = [experts for experts, _ in window.tried]
    return dict(zip(tried, found, strict=True)), window


RATE, WINDOWS = "throughput_per_s:requests/s", frame("place task", "low high chosen")
STUDIES = {
    "coserve_fig17": Study(
        *("coserve_fig17", Executors, measure_executors),
        {"runs": frame("place task executors", RATE)},
        derive_executors,
        check=check_executors,
    ),
    "coserve_fig18": Study(
        *("coserve_fig18", Memory, measure_memory),
        {"runs": frame("place task experts", RATE), "windows": WINDOWS},
        derive_memory,
    ),
}
