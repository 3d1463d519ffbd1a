"""CoServe's claim for UMA in computed time: what a ratio of 4.6 to 12 would need."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.presets import HOST_LOAD_S, get_preset
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.studies.entry import (
    OURS,
    PAPER,
    SAMBA,
    OnTasks,
    Task,
    tell,
)
from moe_edge.papers.coserve.workload.coe_tasks import RECORD_BYTES

PRESET = "uma"
PARALLEL = "samba_parallel"
DISK_BYTES_PER_S = 3000e6
HOLDS = "no policy took less than the bound of time"
# Throughput over Samba's, but for the fourth; switches.
FIGURES = frame(
    "variant",
    "coserve affinity bound coserve_over_parallel "
    "switches_samba switches_coserve switches_affinity switches_least",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants(OnTasks):
    """The size of the study."""

    tasks: Sequence[Task] = ("a1", "b2")


def with_loads(machine: Machine, framework_s: float) -> Machine:
    """Another time beside the read that a framework needs for a load."""
    return _changed(
        machine,
        lambda name, kind: {
            "load_s": {
                "disk": RECORD_BYTES[name] / DISK_BYTES_PER_S + framework_s,
                "host": HOST_LOAD_S,
            }
        },
    )


def with_fixed(machine: Machine, b_s: float) -> Machine:
    """Another fixed time of a batch on the GPU."""
    return _changed(machine, lambda name, kind: {"b_s": b_s} if kind == "gpu" else {})


def with_memory(machine: Machine, share: float) -> Machine:
    """Less memory."""
    memory = {kind: int(share * n) for kind, n in machine.memory_bytes.items()}
    return dataclasses.replace(machine, memory_bytes=memory)


def without_cpu(machine: Machine) -> Machine:
    """All memory to the executors of the GPU."""
    memory = {"gpu": sum(machine.memory_bytes.values())}
    return dataclasses.replace(machine, executors={"gpu": 2}, memory_bytes=memory)


def _changed(machine: Machine, change: Callable[[str, str], Mapping]) -> Machine:
    devices = {
        kind: {
            name: dataclasses.replace(one, **change(name, kind))
            for name, one in each.items()
        }
        for kind, each in machine.devices.items()
    }
    return dataclasses.replace(machine, devices=devices)


# Name -> machine, and decay of the frequencies (None: as the settings say).
VARIANTS: Mapping[str, tuple[Callable[[Machine], Machine], float | None]] = {
    "as assumed": (lambda machine: machine, None),
    "no CPU executor": (without_cpu, None),
    "loads in parallel": (lambda m: dataclasses.replace(m, one_disk=False), None),
    "loads 0.44 s shorter: the read": (lambda m: with_loads(m, 0.0), None),
    "loads 1 s longer": (lambda m: with_loads(m, 1.44), None),
    "no fixed time of a batch": (lambda m: with_fixed(m, 0.0), None),
    "fixed time of a batch 0.1 s": (lambda m: with_fixed(m, 0.1), None),
    "half the memory": (lambda m: with_memory(m, 0.5), None),
    "frequencies exp(-i/20)": (lambda machine: machine, 20.0),
    "frequencies exp(-i/50)": (lambda machine: machine, 50.0),
    "frequencies exp(-i/80)": (lambda machine: machine, 80.0),
}


def measure(settings: Variants, rows: Rows) -> None:
    """Every variant on every task."""
    rows.checks[HOLDS] = True
    for name, (change, decay) in VARIANTS.items():
        machine = change(get_preset(PRESET))
        cases = [
            case
            for task in settings.tasks
            for case in settings.cases(task, PRESET, machine, decay)
        ]
        found = [_figures(case) for case in cases]
        rows.checks[HOLDS] &= all(one.pop("holds") for one in found)
        medians = {key: of_seeds([one[key] for one in found]) for key in FIGURES.units}
        rows("variants", name, **medians)
        print(f"{name}: served", flush=True)
    tell(rows, settings, [SAMBA, PARALLEL])


def _figures(case: CoeCase) -> dict[str, float]:
    """One row's measures of a case, and whether the bound of time holds."""
    runs = {p: case.run(p) for p in (SAMBA, PARALLEL, PAPER, OURS)}
    bounds = [case.bounds(policy) for policy in (PAPER, OURS)]
    time_s = {p: run.time_s for p, run in runs.items()}
    bound_s = min(one["least_time_s"] for one in bounds)
    return {
        "coserve": time_s[SAMBA] / time_s[PAPER],
        "affinity": time_s[SAMBA] / time_s[OURS],
        "bound": time_s[SAMBA] / bound_s,
        "coserve_over_parallel": time_s[PARALLEL] / time_s[PAPER],
        "switches_samba": runs[SAMBA].switches,
        "switches_coserve": runs[PAPER].switches,
        "switches_affinity": runs[OURS].switches,
        "switches_least": min(one["least_switches"] for one in bounds),
        "holds": bound_s <= min(time_s[PAPER], time_s[OURS]),
    }


def derive(tables: Tables) -> dict[str, Any]:
    """The variants by number, for the picture."""
    ratios = tables["variants"].melt("variant", ["coserve", "affinity", "bound"])
    number = tables["variants"].reset_index().set_index("variant")["index"] + 1
    ratios["number"] = ratios.variant.map(number).astype(str)
    return {"ratios": ratios}


STUDY = Study("coserve_uma", Variants, measure, {"variants": FIGURES}, derive)
