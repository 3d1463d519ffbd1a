"""Machines to simulate: the paper's two, and a ten times faster, equal-sized one.

The paper gives the disks (530 and 3,000 MB/s) and that memory is 12 + 16 GB or 24 GB.
All else is an assumption: K 8 and B 30 ms of its networks on a GPU, 90 and 50 ms on a
CPU; a batch of 8; 111 MB an image; 0.66 s (NUMA), 0.44 s (UMA) beside the read that a
framework needs to make a network of a file, 0.35 s of one in host memory. With these
a load takes about 1 s and 0.5 s, and one GPU alone holds 53 and 110 ResNet101.
"""

from collections.abc import Mapping

from moe_edge.coe.machine import Machine
from moe_edge.coe.profile import ArchitectureCosts
from moe_edge.core.checks import check_known
from moe_edge.workload.coe_tasks import RECORD_BYTES

MAX_BATCH = 8
ITEM_BYTES = 111_000_000
LINE_S = {"gpu": (0.008, 0.030), "cpu": (0.090, 0.050)}  # K, B
HOST_LOAD_S = 0.35
SOURCE = "preset: assumptions of ours near the paper's counts, see coe/presets.py"


def numa() -> Machine:
    """RTX 3080 Ti, Xeon, SATA disk: two GPU executors, one CPU executor."""
    return _paper(530e6, 0.66, {"gpu": 10_324_000_000, "cpu": 13_890_000_000}, False)


def uma() -> Machine:
    """Apple M2: the same executors in one memory, with a fast disk."""
    return _paper(3000e6, 0.44, {"gpu": 13_646_000_000, "cpu": 6_823_000_000}, True)


def _paper(
    disk_bytes_per_s: float,
    framework_s: float,
    memory_bytes: Mapping[str, int],
    unified: bool,
) -> Machine:
    devices = {
        kind: {
            name: ArchitectureCosts(
                *(*line, MAX_BATCH, ITEM_BYTES, size),
                {"disk": size / disk_bytes_per_s + framework_s, "host": HOST_LOAD_S},
            )
            for name, size in RECORD_BYTES.items()
        }
        for kind, line in LINE_S.items()
    }
    executors = {"gpu": 2, "cpu": 1}
    return Machine(devices, executors, memory_bytes, unified, source=SOURCE)


REDUCED_BYTES = 156_000  # of each of the small networks


def reduced() -> Machine:
    """All times a tenth, all experts of one size: pools of 24, 24 and 73 of them, or
    one of 53 above a tier of 73. Small networks: K 0.5, B 0.5 ms on every executor."""
    size, item = REDUCED_BYTES, 5 * REDUCED_BYTES // MAX_BATCH
    line = 0.0005, 0.0005
    load_s = {"disk": 0.1, "host": 0.035}
    costs = {
        name: ArchitectureCosts(*line, MAX_BATCH, item, size, load_s)
        for name in RECORD_BYTES
    }
    memory_bytes = {"gpu": 58 * size, "cpu": 78 * size}
    return Machine(
        {"gpu": costs, "cpu": costs}, {"gpu": 2, "cpu": 1}, memory_bytes, source=SOURCE
    )


PRESETS = {"numa": numa, "uma": uma, "reduced": reduced}


def get_preset(name: str) -> Machine:
    """The machine of that name; ConfigError: an unknown one."""
    check_known("machine", name, PRESETS)
    return PRESETS[name]()


def record_bytes(name: str) -> Mapping[str, int]:
    """Of the networks of the board that a preset is meant for."""
    same = dict.fromkeys(RECORD_BYTES, REDUCED_BYTES)
    return same if name == "reduced" else RECORD_BYTES
