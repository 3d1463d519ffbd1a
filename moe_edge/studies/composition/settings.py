"""Whether the parts together beat each alone: time a token over perplexity ratio."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from moe_edge.bench.registry import later
from moe_edge.bench.settings import FromZero, Positive, Seed, StudySettings
from moe_edge.bench.study import Study
from moe_edge.convert.open import check_floats, open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file
from moe_edge.studies.composition.fronts import FRAMES, derive

MOST_LIVE = 12  # cases that may run in real time


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{name} holds {value}, expected shares above 0 and up to 1")


def _check_live(name: str, value: int) -> None:
    if type(value) is not int or not 0 <= value <= MOST_LIVE:
        raise ConfigError(f"{name} is {value}, expected 0 to {MOST_LIVE}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposeSettings(StudySettings):
    """What is compared.

    Attributes:
      checkpoint: a model in bfloat16: folder, GGUF file or `default`.
      text: on which perplexity is measured and lookups are recorded; calibration: of
        the profile that pruning and refactoring read, with as much of the task families
        that exact match is measured on.
      tokens: scored, at least; length: of a row of them; calibration_tokens: of each.
      shares: of the bfloat16 bytes of the experts, whatever the format.
      link_factors: time of a bfloat16 record on the link, in layers of compute.
      link_latency_s: of a transfer.
      timed_steps: decode steps that replay times, after as many that warm the cache.
      questions: of which exact match is measured, of each task family.
      live_cases: run in real time over the emulated link, beside their replay.
      processor_time: measure steps by the processor's time, where others use the
        machine; with MOE_EDGE_THREADS=1, and without live cases.
      data_dir: where relative paths are looked up.
      work_dir: where checkpoints and finished cases are kept; what is there is not made
        again, so that a run that was killed goes on.
    """

    checkpoint: str = "default"
    text: str = "text/wikitext-2/test.txt"
    calibration: str = "text/wikitext-2/valid.txt"
    tokens: int = 8192
    length: int = 256
    calibration_tokens: int = 16_384
    shares: Sequence[Annotated[float, _check_share]] = (0.15, 0.25, 0.5)
    link_factors: Sequence[Positive] = (0.5, 2.0, 8.0)
    link_latency_s: FromZero = 50e-6
    timed_steps: int = 768
    questions: int = 60
    live_cases: Annotated[int, _check_live] = 5
    processor_time: bool = False
    data_dir: str = "../shared/data"
    work_dir: str = "results/local/better_together"
    seed: Seed = 0

    def __post_init__(self):
        super().__post_init__()
        if self.length < 2 or self.tokens < 2 * self.timed_steps:
            raise ConfigError(
                f"tokens is {self.tokens} in rows of {self.length}, expected rows of 2 "
                f"or more and twice the {self.timed_steps} timed_steps"
            )

    def path(self, name: str) -> Path:
        """Of a text."""
        return Path(find_file(name, self.data_dir))


def check(settings: ComposeSettings) -> None:
    """Refuses texts and checkpoints that cannot be used."""
    for name in (settings.text, settings.calibration):
        settings.path(name)
    reader = open_checkpoint(settings.checkpoint)
    check_floats(reader, "this study")
    if reader.dtype.itemsize != 2:
        raise ConfigError(
            f"{settings.checkpoint} has experts in {reader.dtype.name}, expected "
            "bfloat16, whose bytes budgets are shares of (moe-edge convert --dtype)"
        )


STUDY = Study(
    name="better_together",
    settings=ComposeSettings,
    frames=FRAMES,
    measure=later("studies.composition.measure.run"),
    derive=derive,
    check=check,
    inline=True,
    start={"seed": None},  # of the text and the checkpoints, which all starts share
)
