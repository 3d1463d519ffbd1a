"""CoServe, figures 17 and 18 in computed time: how many executors, how many experts."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.coe.machine import Machine, parse_executors
from moe_edge.coe.presets import get_preset
from moe_edge.coe.profile import largest_bucket
from moe_edge.coe.trial import with_executors
from moe_edge.core.checks import check_count
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.place.coserve_memory import Window, decaying_window
from moe_edge.studies.coserve.entry import (
    DISKS,
    PAPER,
    REASON,
    OnMachines,
    OnTasks,
    median_row,
    simulated,
)
from moe_edge.studies.study import Claim, Findings, Study
from moe_edge.workload.coe_tasks import CLASSIFIER, RECORD_BYTES

SIZE = RECORD_BYTES[CLASSIFIER]
ITEM_BYTES = 3 * SIZE // 2  # an image of a batch needs 1.5 experts (section 3.3)


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
class Memory(OnTasks):
    """The size of figure 18.

    Attributes:
      disks: as of OnMachines.
      start: experts of the first window; margin: by which its line may be missed.
    """

    rules = OnTasks.rules | {"margin": lambda name, value: None}  # the window checks it
    disks: Sequence[str] = tuple(DISKS)
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


def measure_executors(settings: Executors) -> Findings:
    """CoServe with every number of executors."""
    rows, best, panels = [], {}, []
    for name, (preset, machine) in settings.places().items():
        values: dict[str, list[float]] = {}
        for task in settings.tasks:
            for text in settings.executors:
                cases = settings.cases(task, preset, with_(machine, text))
                found = [case.run(PAPER).throughput_per_s for case in cases]
                rows.append(
                    median_row(text, f"throughput, {name}, {task}", found, "requests/s")
                )
                values.setdefault(text, []).append(float(np.median(found)))
            most = max(settings.executors, key=lambda text: values[text][-1])
            best.setdefault(name, {})[task] = most
            print(f"{name}, {task}: best with {most}", flush=True)
        title = f"{name}, coserve"
        panels.append(Panel(title, "requests/s", list(settings.tasks), values))
    said = "; ".join(
        f"{name}: " + ", ".join(sorted(set(found.values())))
        for name, found in best.items()
    )
    return simulated(
        settings,
        answer=f"CoServe's throughput is highest with {said} (by task).",
        details=[
            f"{name}: " + ", ".join(f"{task} {text}" for task, text in found.items())
            for name, found in best.items()
        ],
        metrics=rows,
        ours={"best": best},
        limits=[
            "Memory of a kind without executors stays unused (NUMA) or goes to the "
            "others (UMA). Each executor computes at the processor's full speed."
        ],
        plot=lambda path: draw_panels(path, panels, title="Executors (simulated)"),
        summary={"best": best},
    )


def with_experts(experts: int) -> Machine | None:
    """NUMA with so many experts in the pools of its GPU, the rest for batches.

    None if not even batches of one image fit.
    """
    machine = get_preset("numa")
    memory, executors = dict(machine.memory_bytes), machine.executors["gpu"]
    pool = experts * SIZE // executors
    usual = max(one.max_batch for one in machine.devices["gpu"].values())
    images = (memory["gpu"] // executors - pool) // ITEM_BYTES
    if images < 1:
        return None
    batch = min(largest_bucket(images), usual)
    memory["gpu"] = executors * (pool + batch * ITEM_BYTES)
    gpu = {
        name: dataclasses.replace(one, max_batch=batch, item_bytes=ITEM_BYTES)
        for name, one in machine.devices["gpu"].items()
    }
    devices = {**machine.devices, "gpu": gpu}
    return dataclasses.replace(machine, devices=devices, memory_bytes=memory)


def measure_memory(settings: Memory) -> Findings:
    """Throughput at the ends of the windows, task by task, as the first seed slides."""
    most = max(n for n in range(1, 200) if with_experts(n) is not None)
    check_count("experts for which there is memory", most)
    rows, windows = [], {}
    for disk, task in itertools.product(settings.disks, settings.tasks):
        by_number: dict[int, list[float]] = {}

        def throughput(
            experts: int, disk=disk, task=task, by_number=by_number
        ) -> float:
            machine = with_experts(experts)
            machine = dataclasses.replace(machine, one_disk=disk == "one")
            cases = settings.cases(task, "numa", machine)
            found = [case.run(PAPER).throughput_per_s for case in cases]
            by_number[experts] = found
            return float(np.median(found))

        window = decaying_window(throughput, most, settings.start, settings.margin)
        where = task + DISKS[disk]
        windows[where] = _told(window)
        for experts, found in by_number.items():
            name = f"throughput, numa, {experts} experts"
            rows.append(median_row(where, name, found, "requests/s"))
        print(f"{where}: {windows[where]}", flush=True)
    ends = sorted({n for found in windows.values() for n in found["ends"]})
    series = {
        task: [dict(found["tried"]).get(n, np.nan) for n in ends]
        for task, found in windows.items()
    }
    spans = {task: f"{found['low']}-{found['high']}" for task, found in windows.items()}
    said = "; ".join(f"{task} {span}" for task, span in spans.items())
    panel = Panel(
        "numa, coserve", "requests/s", ends, series, x_label="experts in GPU memory"
    )
    return simulated(
        settings,
        answer=f"The window stops at {said} experts in GPU memory, of at most {most}.",
        metrics=rows,
        ours={"windows": spans},
        limits=[
            "An image of a batch takes the memory of 1.5 experts, as the paper says of "
            "its GPU; batches end at 8 images or where memory does."
        ],
        plot=lambda path: draw_panels(path, [panel], title="Memory (simulated)"),
        summary={"windows": windows},
    )


def _told(window: Window) -> dict[str, Any]:
    """A window for JSON."""
    tried = [(n, round(value, 3)) for n, value in window.tried]
    told = {"low": window.low, "high": window.high, "chosen": window.chosen}
    return told | {"ends": [n for n, _ in tried], "tried": tried}


STUDIES = {
    "coserve_fig17": Study(
        name="coserve_fig17",
        question="How many executors pay (CoServe, figure 17)?",
        settings=Executors,
        check=check_executors,
        measure=measure_executors,
        claim=Claim(
            source="CoServe, section 5.3, figure 17",
            paper={"best": {"task A": "3 GPU, 1 CPU", "task B": "4 GPU, 1 CPU"}},
            why="Executors of one GPU share it in the paper; here each has its own "
            "speed, so more of them lose only by smaller pools and batches' memory.",
            not_comparable=REASON,
        ),
    ),
    "coserve_fig18": Study(
        name="coserve_fig18",
        question="Where does the decaying window stop (CoServe, figure 18)?",
        settings=Memory,
        measure=measure_memory,
        claim=Claim(
            source="CoServe, section 5.3, figure 18",
            paper={"windows": {"task A": "28-39 (35 taken)", "task B": "31-42 (34)"}},
            why="What a batch saves follows from the assumed K and B; the paper's "
            "windows for A are ours with start 15, those for B are not.",
            not_comparable=REASON,
        ),
    ),
}
