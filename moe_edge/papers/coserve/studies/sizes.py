"""CoServe, figures 17 and 18 in computed time: how many executors, how many experts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import CapacityError
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.coserve.coe.machine import Machine, parse_executors
from moe_edge.papers.coserve.coe.trial import TrialOptions, slide_window, with_executors
from moe_edge.papers.coserve.memory.coserve_memory import Window
from moe_edge.papers.coserve.studies.entry import (
    PAPER,
    REASON,
    OnMachines,
    median_row,
    simulated,
)
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

    rules = OnMachines.rules | {
        "margin": lambda name, value: None
    }  # the window checks it
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


def with_images(machine: Machine) -> Machine:
    """The machine with images that need as much memory as the paper says."""
    gpu = {
        name: dataclasses.replace(one, item_bytes=ITEM_BYTES)
        for name, one in machine.devices["gpu"].items()
    }
    return dataclasses.replace(machine, devices={**machine.devices, "gpu": gpu})


def measure_memory(settings: Memory) -> Findings:
    """Throughput at the ends of the windows, task by task, as the first seed slides."""
    rows, windows = [], {}
    for place, (preset, machine) in settings.places().items():
        for task in settings.tasks:
            by_number, window = slide(settings, task, preset, with_images(machine))
            where = f"{place}, {task}"
            windows[where] = _told(window)
            for experts, found in by_number.items():
                name = f"throughput, {experts} experts"
                rows.append(median_row(where, name, found, "requests/s"))
            print(f"{where}: {windows[where]}", flush=True)
    spans = {where: f"{one['low']}-{one['high']}" for where, one in windows.items()}
    said = "; ".join(f"{where} {span}" for where, span in spans.items())
    by_place = "; ".join(
        f"{place} {_span([windows[f'{place}, {task}'] for task in settings.tasks])}"
        for place in settings.places()
    )
    return simulated(
        settings,
        answer="The window stops at these numbers of experts in GPU memory, over the "
        f"tasks: {by_place}.",
        details=[f"By task: {said}."],
        metrics=rows,
        ours={"windows": spans},
        limits=[
            "An image of a batch takes the memory of 1.5 experts, as the paper says of "
            "its GPU; batches end at 8 images or where memory does."
        ],
        plot=lambda path: draw_panels(
            path,
            [_window_panel(settings, place, windows) for place in settings.places()],
            title="Memory (simulated)",
        ),
        summary={"windows": windows},
    )


def _span(windows: Sequence[Mapping[str, int]]) -> str:
    """The least and the largest number of experts that windows stop at."""
    return f"{min(w['low'] for w in windows)}-{max(w['high'] for w in windows)}"


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


def _window_panel(
    settings: Memory, place: str, windows: Mapping[str, dict[str, Any]]
) -> Panel:
    """Throughput over experts of every task on a machine."""
    tried = {
        task: dict(windows[f"{place}, {task}"]["tried"]) for task in settings.tasks
    }
    ends = sorted({n for one in tried.values() for n in one})
    series = {task: [one.get(n, np.nan) for n in ends] for task, one in tried.items()}
    return Panel(place, "requests/s", ends, series, x_label="experts in GPU memory")


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
            "speed, so more of them lose only by smaller pools and batches' memory. "
            "On NUMA with parallel loads the best choice (4 GPU, 1 CPU) is the paper's "
            "for task B; with one disk loads wait for each other, and fewer executors "
            "are better.",
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
            "windows for A are ours with start 15, those for B are not. On NUMA with "
            "parallel loads task A stops where the paper's does and B one step later; "
            "with one disk both stop later.",
            not_comparable=REASON,
        ),
    ),
}
