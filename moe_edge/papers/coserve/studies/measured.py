"""CoServe, figures 1, 5, 6 and 12, on this machine: what networks and loads take."""

import dataclasses
from collections.abc import Sequence

from moe_edge.bench.registry import later
from moe_edge.bench.settings import RULES, StudySettings
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import check_known

# Network -> side of its images, dtype of its weights, whether it is one of the paper's.
NETWORKS = {
    "board_resnet": (32, "bfloat16", False),
    "board_detector": (32, "bfloat16", False),
    "resnet101": (224, "float32", True),
    "yolov5m": (224, "float32", True),
    "yolov5l": (224, "float32", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(StudySettings):
    """The size of these studies.

    Attributes:
      networks: that are run; files: of each one's weights, which take turns in loads.
      small_batch, small_repeats: largest batch of the boards' networks, and rounds.
      large_batch, large_repeats: of the paper's networks.
      work_dir: where the files are written, up to 1 GB; None: a temporary folder.
    """

    rules = RULES | {
        "networks": lambda name, value: check_known("network", value, NETWORKS)
    }
    networks: Sequence[str] = tuple(NETWORKS)
    files: int = 2
    small_batch: int = 32
    small_repeats: int = 25
    large_batch: int = 8
    large_repeats: int = 5
    work_dir: str | None = None


HARDWARE = "Another processor, without a GPU where the entry says so; other networks."
STUDIES = {
    "coserve_fig1": Study(
        name="coserve_fig1",
        question="How much of a request's latency is a switch (CoServe, figure 1)?",
        settings=Measured,
        measure=later("papers.coserve.studies.measuring.measure_switches"),
        claim=Claim(
            source="CoServe, section 1, figure 1",
            paper={
                "share of the switch": {
                    "SSD to GPU, NUMA and UMA": "over 90 %",
                    "CPU to GPU, UMA": "over 60 %",
                }
            },
            why="A load here is a read and a copy of one flat record, the paper's "
            "makes a model of a file. A processor computes longer than a GPU. It is "
            "measured: the share of an emulated load is what the emulation was told.",
            not_comparable=HARDWARE,
        ),
    ),
    "coserve_fig5": Study(
        name="coserve_fig5",
        question="What time and memory do batches take (CoServe, figures 5, 6, 12)?",
        settings=Measured,
        measure=later("papers.coserve.studies.measuring.measure_batches"),
        claim=Claim(
            source="CoServe, sections 3.3 and 4.5, figures 5, 6 and 12",
            paper={
                "best batch, UMA": {"GPU": 6, "CPU": 5},
                "memory of an image, ResNet101, NUMA GPU": "1.5 experts",
                "latency of a batch": "K n + B",
            },
            why="A core is busy with one image, so batches save little on a processor; "
            "a compiled program keeps a layer's values at a time, a framework more.",
            not_comparable=HARDWARE,
        ),
    ),
}
