"""CoServe, table 1: the paper's machines, the presets that stand for them, and ours."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.metrics.machine import machine_info
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.coserve.coe.presets import PRESETS, get_preset, record_bytes
from moe_edge.papers.coserve.workload.coe_tasks import (
    CLASSIFIER,
    RECORD_BYTES,
    board_graph,
)

GB = 1e9
PAPER = {
    "paper, NUMA": {"GPU memory": 12.0, "CPU memory": 16.0, "disk": 0.53},
    "paper, UMA": {"GPU memory": 24.0, "disk": 3.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(StudySettings):
    """The size of the study.

    Attributes:
      file_bytes: of each file that is read; files: how many; repeats: reads of each.
    """

    file_bytes: int = RECORD_BYTES[CLASSIFIER]
    files: int = 3
    repeats: int = 5


def measure(settings: Hardware) -> Findings:
    """Memory of all machines, what presets hold and take, and this machine's rates."""
    rates = _rates(settings)
    rows = [
        metric(name, what, GB * value, "bytes/s" if what == "disk" else "bytes")
        for name, of in PAPER.items()
        for what, value in of.items()
    ]
    held, loads = {}, {}
    for name in PRESETS:
        found, held[name], loads[name] = _preset_rows(name)
        rows += found
    here = machine_info()
    if here["ram_bytes"]:
        rows.append(metric("here", "CPU memory", here["ram_bytes"], "bytes"))
    for tier, seconds in rates.items():
        rate, n = settings.file_bytes / seconds, settings.files * settings.repeats
        rows.append(metric("here", tier, rate, "bytes/s", n))
    load_s = rates["disk"] * RECORD_BYTES[CLASSIFIER] / settings.file_bytes
    times_s = {**{name: load["disk"] for name, load in loads.items()}, "here": load_s}
    names, values, counts = list(held), list(times_s.values()), list(held.values())
    return Findings(
        answer=f"Here a file of a ResNet101's size loads in {load_s:.2g} s, as presets "
        f"have it in {loads['numa']['disk']:.2g} s (NUMA) and "
        f"{loads['uma']['disk']:.2g} s (UMA), framework included.",
        details=[
            f"Preset {name}: room for {n} of {len(board_graph(352).experts)} experts."
            for name, n in held.items()
        ],
        model={"name": ", ".join(RECORD_BYTES), "params": {}, "weights": "none"},
        workload=dataclasses.asdict(settings),
        metrics=rows,
        limits=[
            "The paper does not say what executors, batches and framework leave of the "
            "memory: presets are assumptions (`coe/presets.py`).",
            "A read follows a request to forget the file; below a virtual machine a "
            "cache may still hold it.",
        ],
        ours={"seconds of a ResNet101's load": times_s, "here": _words(here)},
        plot=lambda path: draw_panels(
            path,
            [
                Panel("A ResNet101's load", "s", list(times_s), {"disk": values}),
                Panel("Room in all pools", "experts", names, {"held": counts}),
            ],
            title="Machines",
        ),
        summary={"load_s": times_s},
    )


def _preset_rows(name: str) -> tuple[list[dict[str, Any]], int, dict[str, float]]:
    """Rows of a preset, the experts that its pools hold, and seconds of a load."""
    machine, sizes = get_preset(name), record_bytes(name)
    graph, rows, held = board_graph(352, record_bytes=sizes), [], 0
    for kind, count in machine.executors.items():
        pool = machine.pool_bytes(kind, graph, count)
        held += count * (pool // max(sizes.values()))
        rows.append(metric(f"preset {name}", f"pool, {kind}", pool, "bytes", count))
    load_s = dict(machine.devices[machine.first][CLASSIFIER].load_s)
    for tier, seconds in load_s.items():
        what = f"load of a {CLASSIFIER}, {tier}"
        rows.append(metric(f"preset {name}", what, seconds, "s"))
    return rows, held, load_s


def _rates(settings: Hardware) -> dict[str, float]:
    """Median seconds of a read into a device, from disk and from another memory."""
    from moe_edge.papers.coserve.coe.profiler import device_of, time_loads

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = _written(Path(folder), rng, settings)
        device = device_of("gpu")
        found, _ = time_loads(paths, device, settings.repeats)
    if device.platform == "cpu":
        del found["host"]  # the same memory
    return found


def _written(folder: Path, rng, settings: Hardware) -> Sequence[Path]:
    paths = [folder / f"{number}.bin" for number in range(settings.files)]
    for path in paths:
        rng.integers(0, 256, settings.file_bytes, np.uint8).tofile(path)
    return paths


def _words(here: dict[str, Any]) -> str:
    memory = here["ram_bytes"] or 0
    return f"{here['cpu']}, {here['cores']} cores, {memory / GB:.0f} GB"


STUDY = Study(
    name="coserve_table1",
    question="On what machines (CoServe, table 1)?",
    settings=Hardware,
    measure=measure,
    claim=Claim(
        source="CoServe, section 5.1, table 1; section 1, figure 1",
        paper={
            "NUMA": "RTX 3080 Ti 12 GB, Xeon Silver 4214R 16 GB, SSD 530 MB/s",
            "UMA": "Apple M2 24 GB, SSD about 3000 MB/s",
        },
        why="Presets stand for the paper's machines; live runs are on this one.",
        not_comparable="Other machines.",
    ),
)
