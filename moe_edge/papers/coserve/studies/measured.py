"""CoServe, figures 1, 5, 6 and 12, on this machine: what networks and loads take."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from moe_edge.bench.registry import later
from moe_edge.bench.settings import StudySettings, known
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Frame, frame

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

    networks: Sequence[Annotated[str, known("network", NETWORKS)]] = tuple(NETWORKS)
    files: int = 2
    small_batch: int = 32
    small_repeats: int = 25
    large_batch: int = 8
    large_repeats: int = 5
    work_dir: str | None = None


def _study(name: str, what: str, **more: Frame) -> Study:
    """A study of networks, whose frame `networks` is filled by all."""
    measure, derive = (
        later(f"papers.coserve.studies.measuring.{step}_{what}")
        for step in ("measure", "derive")
    )
    start = {"small_repeats": 9, "large_repeats": 3}
    frames = {"networks": NETWORK, **more}
    return Study(name, Measured, measure, frames, derive, start=start)


NETWORK = frame(
    "network device",
    "k_ms b_ms image_ms r2 line_miss best_batch image_experts "
    "image_bytes batch_bytes record_bytes load_disk_ms load_host_ms "
    "share_disk share_host",
)
BATCHES = frame("group network device batch", "image_ms memory_bytes")
STUDIES = {
    "coserve_fig1": _study("coserve_fig1", "switches"),
    "coserve_fig5": _study("coserve_fig5", "batches", batches=BATCHES),
}
