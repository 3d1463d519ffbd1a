"""Machines to simulate: the paper's two, and a ten times faster, equal-sized one.

The paper gives the disks (530 and 3,000 MB/s) and that memory is 12 + 16 GB or 24 GB.
All else is an assumption: K 8 and B 30 ms of its networks on a GPU, 90 and 50 ms on a
CPU; a batch of 8; 111 MB an image; 0.66 s (NUMA), 0.44 s (UMA) beside the read that a
framework needs to make a network of a file, 0.35 s of one in host memory. With these
a load takes about 1 s and 0.5 s, and one GPU alone holds 53 and 110 ResNet101.
"""

from collections.abc import Mapping

from moe_edge.core.checks import check_known
from moe_edge.papers.coserve.coe.machine import Machine
from moe_edge.papers.coserve.coe.profile import ArchitectureCosts
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_tasks import RECORD_BYTES

MAX_BATCH = 8
ITEM_BYTES = 111_000_000
LINE_S = {"gpu": (0.008, 0.030), "cpu": (0.090, 0.050)}  # K, B
HOST_LOAD_S = 0.35
Sizes = Mapping[str, int]  # architecture -> bytes of the weights of one expert
SOURCE = "preset: assumptions of ours near the paper's counts, see coe/presets.py"


def numa(sizes: Sizes = RECORD_BYTES) -> Machine:
    """RTX 3080 Ti, Xeon, SATA disk: two GPU executors, one CPU executor."""
    memory = {"gpu": 10_324_000_000, "cpu": 13_890_000_000}
    return _paper(sizes, 530e6, 0.66, memory, False)


def uma(sizes: Sizes = RECORD_BYTES) -> Machine:
    """Apple M2: the same executors in one memory, with a fast disk."""
    memory = {"gpu": 13_646_000_000, "cpu": 6_823_000_000}
    return _paper(sizes, 3000e6, 0.44, memory, True)


def _paper(
    sizes: Sizes,
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
            for name, size in sizes.items()
        }
        for kind, line in LINE_S.items()
    }
    executors = {"gpu": 2, "cpu": 1}
    return Machine(devices, executors, memory_bytes, unified, source=SOURCE)


REDUCED_BYTES = 156_000  # of each of the small networks
REDUCED = dict.fromkeys(RECORD_BYTES, REDUCED_BYTES)


def reduced(sizes: Sizes = REDUCED) -> Machine:
    """All times a tenth: pools of 24, 24 and 73 of the largest expert, or one of 53
    above a tier of 73. Small networks: K 0.5, B 0.5 ms on every executor."""
    size = max(sizes.values())
    line, item = (0.0005, 0.0005), 5 * size // MAX_BATCH
    load_s = {"disk": 0.1, "host": 0.035}
    costs = {
        name: ArchitectureCosts(*line, MAX_BATCH, item, each, load_s)
        for name, each in sizes.items()
    }
    memory_bytes = {"gpu": 58 * size, "cpu": 78 * size}
    return Machine(
        {"gpu": costs, "cpu": costs}, {"gpu": 2, "cpu": 1}, memory_bytes, source=SOURCE
    )


PRESETS = {"numa": numa, "uma": uma, "reduced": reduced}


def get_preset(name: str, graph: CoeGraph | None = None) -> Machine:
    """The machine of that name, for the networks of a graph, or those it is meant for.

    Raises:
      ConfigError: an unknown one.
    """
    check_known("machine", name, PRESETS)
    if graph is None:
        return PRESETS[name]()
    return PRESETS[name](
        {n: one.record_bytes for n, one in graph.architectures.items()}
    )


def record_bytes(name: str) -> Sizes:
    """Of the networks of the board that a preset is meant for."""
    return REDUCED if name == "reduced" else RECORD_BYTES
