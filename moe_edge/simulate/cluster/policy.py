"""When and how the placement of a simulated cluster changes."""

import dataclasses

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.place.migrate import SOURCES, Decision
from moe_edge.place.placer import Placer


@dataclasses.dataclass(frozen=True)
class MigrationPolicy:
    """When and how placements change.

    Attributes:
      placer: finds candidates.
      period_s: between two decisions; Prism's is 5 minutes.
      keep: share of the statistics that stays after each period; 1 keeps all since
        the start, as Prism does (section IV-B), which reacts late to new data.
      hysteresis: see `place.migrate.decide`.
      source: where blocks come from (`place.migrate.SOURCES`); Prism's eq. 3 counts
        host links, so its servers have every block in host memory.
      chunk_bytes: of a block on the network, so that calls need not wait for all of it.
    """

    placer: Placer
    period_s: float = 300.0
    keep: float = 1.0
    hysteresis: float = 0.05
    source: str = "host"
    chunk_bytes: int = 2**20

    def __post_init__(self):
        check_positive("migration period_s", self.period_s)
        check_count("chunk_bytes", self.chunk_bytes)
        check_rule(self.period_s, self.keep, self.hysteresis, self.source)


def check_rule(period_s: float, keep: float, hysteresis: float, source: str) -> None:
    """Checks a `MigrationPolicy`'s fields; a period of 0 is no migration.

    Raises:
      ConfigError: out of range or unknown.
    """
    check_from_zero("migration period_s", period_s)
    check_known("source of blocks", source, SOURCES)
    if not 0 <= keep <= 1:
        raise ConfigError(f"keep must lie in [0, 1], got {keep}")
    if not 0 <= hysteresis < 1:
        raise ConfigError(f"hysteresis is {hysteresis}, expected 0 or more, below 1")


@dataclasses.dataclass
class Migration:
    """One decision and what became of it; `done_s` is None if nothing moved."""

    time_s: float
    decision: Decision
    done_s: float | None = None
