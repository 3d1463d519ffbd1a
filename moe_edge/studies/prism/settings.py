"""The settings of the studies of placement (Prism), and what limits them all."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.hardware.models import model_shape
from moe_edge.simulate.cluster.build import WORKLOADS
from moe_edge.simulate.cluster.case import METHODS
from moe_edge.studies.smoe.settings import Findings

EPLB, PRISM, OPTIMUM, OURS = "eplb_heterogeneous", "prism", "optimal", "latency"
PAPERS = ("uniform", "redundance", "smartmoe", EPLB, PRISM)  # methods of table II
REASON = (
    "The routing is generated (fitted to measured domains, the narrow tasks assumed) "
    "and so are lengths and arrivals; the cost model is a preset without the software "
    "of the paper's test bed, whose seconds are several times ours. Compare ratios."
)
LIMITS = (
    "Simulated: no GPU and no network took part. Devices and lines are presets (device "
    "rates assumed at fixed shares of datasheet peaks), not calibrated on a machine.",
    "Software overheads (Python, serialisation, TCP, Docker, batching) are not "
    "modelled, nor are the head, sampling and the KV cache.",
    "BIG-bench tasks are generated: the skew of narrow tasks is an assumption "
    "(`TASK_SKEW` in workload/routing_model.py), studied in prism_sensitivity.",
    "Spreads are over seeds of arrivals, lengths, routing and random placements.",
)


MORE_THAN_ZERO = ("interval_s", "window_s")
FROM_ZERO = ("period_s", "hysteresis")
SHARES = ("keep", "keeps", "remote_shares")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """What every study of placement reads, and the checks of what some add.

    Attributes:
      seed, seeds: the first one and how many; rows are medians over them.
      requests_per_server: how many.
    """

    seed: int = 0
    seeds: int = 5
    requests_per_server: int = 60

    def __post_init__(self):
        for name in ("seeds", "requests_per_server"):
            check_count(name, getattr(self, name))
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(field.default, tuple) and (
                isinstance(value, str) or not len(value)
            ):
                raise ConfigError(f"{name} is {value!r}, expected a list")
            values = value if isinstance(field.default, tuple) else (value,)
            if name in MORE_THAN_ZERO:
                check_positive(name, value)
            if name in FROM_ZERO:
                check_from_zero(name, value)
            if name in SHARES and not all(0 <= share <= 1 for share in values):
                raise ConfigError(f"{name}: shares must lie in [0, 1], got {value}")
            if name == "methods":
                for method in values:
                    check_known("method", method, METHODS)
            if name == "workload":
                check_known("workload", value, WORKLOADS)
            if name == "model":
                model_shape(value)

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Migration:
    """The rule by which placements change; the defaults are the paper's.

    Attributes:
      period_s: between two decisions; 0 is no migration.
      keep: of the statistics, at each decision.
      hysteresis: gain that a new placement must promise, as a share.
    """

    period_s: float = 300.0
    keep: float = 1.0
    hysteresis: float = 0.0

    @property
    def moving(self) -> dict[str, float]:
        """As `Case.loop` takes them."""
        return {
            "period_s": self.period_s,
            "keep": self.keep,
            "hysteresis": self.hysteresis,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrismSettings:
    """The size of a study; not every study reads everything.

    Attributes:
      seed, seeds: the first one and how many; rows are medians over them.
      requests_per_server: how many.
      model, workload: where a study is of one.
      interval_s: mean seconds between requests of a server.
      methods: what is compared.
      period_s, keep, hysteresis: of migration; the paper's rule is 300 s, everything
        kept (1), and no hysteresis (0); period_s 0 is no migration.
      keeps, hystereses: the grid of figure 7.
      window_s: of the local ratio over time.
      gpus, intervals, mbps: of figure 8.
      tokens, remote_shares: of figure 5.
      skews, memory_shares: of the sensitivity study.
    """

    seed: int = 0
    seeds: int = 5
    requests_per_server: int = 100
    model: str = "deepseek_v2_lite"
    workload: str = "bigbench"
    interval_s: float = 10.0
    methods: Sequence[str] = (*PAPERS, OPTIMUM, OURS)
    period_s: float = 300.0
    keep: float = 1.0
    hysteresis: float = 0.0
    keeps: Sequence[float] = (1.0, 0.5, 0.0)
    hystereses: Sequence[float] = (0.0, 0.05)
    window_s: float = 120.0
    gpus: Sequence[int] = (4, 16, 64, 256)
    intervals: Sequence[float] = (8.0, 15.0)
    mbps: Sequence[float] = (100.0, 200.0, 500.0, 1000.0)
    tokens: Sequence[int] = (1, 32, 256)
    remote_shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    skews: Sequence[float] = (0.25, 0.5, 1.0, 2.0)
    memory_shares: Sequence[float] = (0.4, 0.5, 0.6, 0.8)

    def __post_init__(self):
        for name in ("seeds", "requests_per_server"):
            check_count(name, getattr(self, name))
        for name in ("interval_s", "window_s"):
            check_positive(name, getattr(self, name))
        for name in ("period_s", "hysteresis"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected 0 or more"
                )
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if isinstance(field.default, tuple) and (
                isinstance(values, str) or not len(values)
            ):
                raise ConfigError(f"{field.name} is {values!r}, expected a list")
        for method in self.methods:
            check_known("method", method, METHODS)
        for share in (*self.remote_shares, *self.keeps, self.keep):
            if not 0 <= share <= 1:
                raise ConfigError(f"shares must lie in [0, 1], got {share}")

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))

    @property
    def moving(self) -> dict[str, float]:
        """How placements change."""
        return {
            "period_s": self.period_s,
            "keep": self.keep,
            "hysteresis": self.hysteresis,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrismFindings(Findings):
    """Findings with further pictures: each draws into the given file."""

    pictures: Mapping[str, Callable[[Path], None]] = dataclasses.field(
        default_factory=dict
    )
