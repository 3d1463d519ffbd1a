"""Prism, table I, live: serving alone against serving together, on real processes."""

import dataclasses
from collections.abc import Sequence

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import frame
from moe_edge.papers.prism.studies import live_seeds
from moe_edge.papers.prism.studies.live_seeds import LiveMethods, MethodName
from moe_edge.papers.prism.studies.table1 import ALONE
from moe_edge.place.placer import ALONE as ALONE_METHODS

TOGETHER = "uniform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1Live(LiveMethods):
    """`LiveMethods` names the rest.

    Attributes:
      link_factor: how long each server's emulated link to its host memory takes for a
        block, in layers of a decoded token by the resident engine alone (measured).
    """

    methods: Sequence[MethodName] = (*ALONE_METHODS, TOGETHER)
    requests_per_server: int = 8
    link_factor: Positive = 2.0


def check(settings: Table1Live) -> None:
    """Refuses a cluster that cannot be, or a comparison without both sides."""
    if not {ALONE, TOGETHER} <= set(settings.methods):
        raise ConfigError(
            f"methods is {tuple(settings.methods)}, expected {ALONE!r} and "
            f"{TOGETHER!r} among them"
        )
    live_seeds.check(settings)


FRAMES = {
    "servers": frame("server method", "seconds:s"),
    "methods": frame(
        "method",
        "over_alone local hit_ratio redirected:requests remote_calls "
        "overhead_ms host_mb",
    ),
}
STUDY = Study(
    "prism_table1_live",
    Table1Live,
    later("papers.prism.studies.table1_live_entry.measure"),
    FRAMES,
    later("papers.prism.studies.table1_live_entry.derive"),
    check=check,
    start={"seeds": 1},
)
