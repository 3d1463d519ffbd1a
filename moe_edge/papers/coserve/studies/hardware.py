"""CoServe, table 1: the paper's machines, the presets that stand for them, and ours."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Estimate, Rows, frame
from moe_edge.metrics.machine import machine_info
from moe_edge.metrics.results import Tables
from moe_edge.papers.coserve.coe.presets import PRESETS, get_preset, record_bytes
from moe_edge.papers.coserve.workload.coe_tasks import (
    CLASSIFIER,
    RECORD_BYTES,
    board_graph,
)

GB = 1e9
PAPER = {
    "paper, NUMA": {"gpu_bytes": 12.0, "cpu_bytes": 16.0, "disk_bytes_per_s": 0.53},
    "paper, UMA": {"gpu_bytes": 24.0, "disk_bytes_per_s": 3.0},
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


def measure(settings: Hardware, rows: Rows) -> None:
    """Memory of all machines, what presets hold and take, and this machine's rates."""
    for name, of in PAPER.items():
        rows("machines", name, **{what: GB * value for what, value in of.items()})
    for name in PRESETS:
        rows("machines", f"preset {name}", **_of_preset(name))
    n = settings.files * settings.repeats
    rates = {
        f"{tier}_bytes_per_s": Estimate(settings.file_bytes / seconds, n, 0.0, "none")
        for tier, seconds in _rates(settings).items()
    }
    rows("machines", "here", **rates, cpu_bytes=machine_info()["ram_bytes"])
    model = {"name": ", ".join(RECORD_BYTES), "params": {}, "weights": "none"}
    rows.about |= {"model": model, "workload": dataclasses.asdict(settings)}


def _of_preset(name: str) -> dict[str, Any]:
    """Pools of a preset, the experts that they hold, and seconds of a load."""
    machine, sizes = get_preset(name), record_bytes(name)
    graph = board_graph(352, record_bytes=sizes)
    found: dict[str, Any] = {"experts": 0, "of_experts": len(graph.experts)}
    for kind, count in machine.executors.items():
        pool = machine.pool_bytes(kind, graph, count)
        found["experts"] += count * (pool // max(sizes.values()))
        found[f"pool_{kind}_bytes"] = Estimate(pool, count, 0.0, "none")
    load_s = machine.devices[machine.first][CLASSIFIER].load_s
    return found | {f"load_{tier}_s": seconds for tier, seconds in load_s.items()}


def derive(tables: Tables) -> dict[str, Any]:
    """Seconds of a ResNet101's load from disk, on this machine by its rate."""
    machines = tables["machines"].set_index("machine")
    here = RECORD_BYTES[CLASSIFIER] / machines.disk_bytes_per_s["here"]
    load_s = machines.load_disk_s.dropna()
    load_s["here"] = here
    load_s.index = load_s.index.str.removeprefix("preset ")
    return {"load_s": load_s.rename_axis("machine").rename("load_s").reset_index()}


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


STUDY = Study(
    name="coserve_table1",
    settings=Hardware,
    frames={
        "machines": frame(
            "machine",
            **dict.fromkeys(("gpu_bytes", "cpu_bytes"), "bytes"),
            **dict.fromkeys(("disk_bytes_per_s", "host_bytes_per_s"), "bytes/s"),
            **dict.fromkeys(("pool_gpu_bytes", "pool_cpu_bytes"), "bytes"),
            **dict.fromkeys(("load_disk_s", "load_host_s"), "s"),
            **dict.fromkeys(("experts", "of_experts"), "1"),
        )
    },
    measure=measure,
    derive=derive,
)
