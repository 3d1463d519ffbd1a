"""What the studies of placement (Prism) share: settings, runs in computed time, rows.

A `Case` is built once for a seed: every method, line and memory size serves the same
requests with the same routing, so that ratios are of pairs.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_count, check_known, check_positive
from moe_edge.hardware.clusters import build_cluster
from moe_edge.hardware.models import ModelShape
from moe_edge.metrics.results import metric
from moe_edge.metrics.study_settings import Findings, claim
from moe_edge.simulate.cluster_build import build_case
from moe_edge.simulate.cluster_case import METHODS, Case
from moe_edge.simulate.cluster_report import ClusterResult, report
from moe_edge.simulate.cluster_state import LoopOptions
from moe_edge.simulate.run_simulate import sources

SPREAD = "half range of seeds"
EPLB, PRISM, OPTIMUM, OURS = "eplb_heterogeneous", "prism", "optimal", "latency"
PAPERS = ("uniform", "redundance", "smartmoe", EPLB, PRISM)  # methods of table II
EQUAL = 5e-4  # relative: latencies closer than that count as equal
MEAN, LOCAL = "mean_latency_s", "local_ratio"
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


Row = dict[str, Any]
Rows = dict[str, list[Row]]  # method -> one row a seed


def on_cluster(case: Case, cluster: str, **options) -> Case:
    """The same requests on other machines (as many servers)."""
    machines = build_cluster(cluster, **options)
    return dataclasses.replace(case, cost_model=case.shape.costs(machines))


def serve(
    case: Case, method: str, seed: int, window_s: float = 120.0, **moving
) -> ClusterResult:
    """Runs one method to its end."""
    loop = case.loop(method, LoopOptions(window_s=window_s), seed=seed, **moving)
    loop.run()
    return report(loop)


def serve_all(
    cases: Iterable[tuple[int, Case]], methods: Sequence[str], label: str, **moving
) -> Rows:
    """Every method on every (seed, case)."""
    found: Rows = {method: [] for method in methods}
    for seed, case in cases:
        for method in methods:
            found[method].append(serve(case, method, seed, **moving).row())
        shown = ", ".join(f"{m} {rows[-1][MEAN]:.3f}" for m, rows in found.items())
        print(f"{label}, seed {seed}: {shown}", flush=True)
    return found


def cases_of(settings: PrismSettings, **wanted) -> list[tuple[int, Case]]:
    """A case for every seed, as the settings and `wanted` say."""
    common = {
        "model": settings.model,
        "workload": settings.workload,
        "interval_s": settings.interval_s,
        "requests_per_server": settings.requests_per_server,
    }
    return [
        (seed, build_case(**common | wanted, seed=seed)) for seed in settings.all_seeds
    ]


def values(rows: Sequence[Row], key: str = MEAN) -> np.ndarray:
    """float64 [seeds]."""
    return np.array([row[key] for row in rows], np.float64)


def median_row(
    method: str, name: str, found: Sequence[float], unit: str = "s"
) -> dict[str, Any]:
    """A metric: the median over seeds with half their range."""
    spread = (SPREAD, float(np.ptp(found)) / 2)
    return metric(method, name, float(np.median(found)), unit, len(found), spread)


def ratio(rows: Rows, method: str, over: str, key: str = MEAN) -> np.ndarray:
    """float64 [seeds]: one method's mean latency over another's, seed by seed."""
    return values(rows[method], key) / values(rows[over], key)


def percent(found: Sequence[float]) -> str:
    """How far a ratio is from 1, such as `-12.3 %`; the median over seeds."""
    return f"{100 * (float(np.median(found)) - 1):+.1f} %"


def slower(ratios: np.ndarray) -> int:
    """In how many seeds a ratio of latencies is above 1 by more than EQUAL."""
    return int((ratios > 1 + EQUAL).sum())


def losses(rows: Rows, method: str, over: str) -> str | None:
    """In how many seeds a method that ought to win was slower; None if in none."""
    if method not in rows or over not in rows:
        return None
    found = ratio(rows, method, over)
    worse = slower(found)
    if not worse:
        return None
    return (
        f"{method} slower than {over} in {worse} of {len(found)} seeds "
        f"(median {percent(found)})"
    )


def worse_than(rows_of: Mapping[str, Rows]) -> str:
    """Where our placer or the optimum of eq. 2 loses, case by case."""
    pairs = ((OURS, OPTIMUM), (OURS, PRISM), (OURS, EPLB), (OPTIMUM, PRISM))
    pairs += ((PRISM, EPLB),)
    found = []
    for label, rows in rows_of.items():
        lost = [text for pair in pairs if (text := losses(rows, *pair))]
        if lost:
            found.append(f"{label}: {'; '.join(lost)}")
    return "Slower than it should be: " + (" | ".join(found) or "nowhere") + "."


def prism_claim(source: str, paper: Mapping, ours: Mapping, why: str) -> dict[str, Any]:
    """`paper_claim`, marked as not comparable, with the reason."""
    found = claim(source, paper, ours, why)
    return found | {"comparable": False, "reason": REASON}


def shape_entry(*shapes: ModelShape) -> dict[str, Any]:
    """`model` of an entry: only shapes took part; params are of a token's layers."""
    params = {
        shape.name: int(
            shape.num_blocks * shape.block.flops(1) / 2
            + shape.num_layers * shape.dense.flops_per_token / 2
        )
        for shape in shapes
    }
    return {
        "name": ", ".join(params),
        "params": params if len(params) > 1 else next(iter(params.values())),
        "weights": "none: shapes only, routing generated",
    }


def workload_entry(settings: PrismSettings, case: Case, **facts) -> dict[str, Any]:
    """`workload` of an entry."""
    return {
        "comparable": False,
        "why_not_comparable": REASON,
        "routing": "generated by moe_edge/workload/routing_model.py",
        "requests_per_server": settings.requests_per_server,
        "arrivals": "poisson",
        "max_batch": LoopOptions().max_batch,
        **facts,
        "hardware": sources(case),
    }
