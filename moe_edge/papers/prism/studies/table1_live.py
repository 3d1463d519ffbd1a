"""Prism, table I, live: serving alone against serving together, on real processes."""

import dataclasses
from collections.abc import Sequence

from moe_edge.bench.registry import later
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import ConfigError
from moe_edge.papers.prism.studies import live_seeds
from moe_edge.papers.prism.studies.live_entry import NOT_COMPARABLE
from moe_edge.papers.prism.studies.live_seeds import LiveMethods
from moe_edge.papers.prism.studies.table1 import ALONE, TABLE_1
from moe_edge.place.placer import ALONE as ALONE_METHODS

TOGETHER = "uniform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1Live(LiveMethods):
    """`LiveMethods` names the rest.

    Attributes:
      link_factor: how long each server's emulated link to its host memory takes for a
        block, in layers of a decoded token by the resident engine alone (measured).
    """

    methods: Sequence[str] = (*ALONE_METHODS, TOGETHER)
    requests_per_server: int = 8
    link_factor: float = 2.0


def check(settings: Table1Live) -> None:
    """Refuses a cluster that cannot be, or a comparison without both sides."""
    if not {ALONE, TOGETHER} <= set(settings.methods):
        raise ConfigError(
            f"methods is {tuple(settings.methods)}, expected {ALONE!r} and "
            f"{TOGETHER!r} among them"
        )
    live_seeds.check(settings)


STUDY = Study(
    name="prism_table1_live",
    question="Does sharing experts beat serving alone on three live servers (Prism, "
    "table I)?",
    settings=Table1Live,
    measure=later("papers.prism.studies.table1_live_entry.measure"),
    check=check,
    claim=Claim(
        source="Prism, table I; seconds on servers 1, 2, 3 and over all",
        paper=TABLE_1,
        why="The paper names no rate of its host link (A100s, so PCIe 4: about 400 "
        "times its 500 Mbit/s) and loads blocks of 350 MB. Ours are 74 kB, which any "
        "such link brings at once. So the link is emulated: one load lasts twice a "
        "layer's computation, the standard of our other studies; a faster link favours "
        "serving alone.",
        not_comparable=NOT_COMPARABLE,
    ),
)
