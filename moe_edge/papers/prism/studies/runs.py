"""What the studies of placement (Prism) read, and their runs in computed time.

A `Scenario` is built once for a seed: every method, line and memory size serves the
same requests with the same routing, so that ratios are of pairs.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated

from moe_edge.bench.settings import (
    FromZero,
    Seeds,
    Share,
    StudySettings,
    by,
    known,
)
from moe_edge.core.checks import ConfigError
from moe_edge.hardware.clusters import build_cluster
from moe_edge.hardware.models import model_shape
from moe_edge.papers.prism.studies.served import EPLB, MEAN, PRISM, MethodRuns, Row
from moe_edge.simulate.cluster.build import WORKLOADS, build_scenario
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.report import ClusterResult
from moe_edge.simulate.cluster.scenario import METHODS, Scenario

# Headlines are of measured usage: BIG-bench's tasks call experts as the text domains do
# that they are built from. Narrower tasks are assumed in the other case only.
MEASURED, ASSUMED = {"narrow_tasks": False}, {"narrow_tasks": True}
USAGE = {"usage": "measured"}  # as entries tell it
PAPERS = ("uniform", "redundance", "smartmoe", EPLB, PRISM)  # methods of table II


Method = Annotated[str, known("method", METHODS)]
Workload = Annotated[str, known("workload", WORKLOADS)]
Model = Annotated[str, by(model_shape)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs(Seeds):
    """What every study of placement reads; `Seeds` names the rest.

    Attributes:
      requests_per_server: how many.
    """

    requests_per_server: int = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Migration(StudySettings):
    """The rule by which placements change; the defaults are the paper's.

    Attributes:
      period_s: between two decisions; 0 is no migration.
      keep: of the statistics, at each decision.
      hysteresis: gain that a new placement must promise, as a share.
    """

    period_s: FromZero = 300.0
    keep: Share = 1.0
    hysteresis: FromZero = 0.0

    @property
    def moving(self) -> dict[str, float]:
        """As `Scenario.loop` takes them."""
        names = ("period_s", "keep", "hysteresis")
        return {name: getattr(self, name) for name in names}


def check_has_prism(methods: Sequence[str]) -> None:
    """Raises ConfigError where the method that a figure is about is missing."""
    if PRISM not in methods:
        raise ConfigError(f"methods is {tuple(methods)}, expected {PRISM!r} among them")


def on_cluster(case: Scenario, cluster: str, **options) -> Scenario:
    """The same requests on other machines (as many servers)."""
    machines = build_cluster(cluster, **options)
    return dataclasses.replace(case, cost_model=case.shape.costs(machines))


def serve(
    case: Scenario, method: str, seed: int, window_s: float = 120.0, **moving
) -> ClusterResult:
    """Runs one method to its end."""
    loop = case.loop(method, LoopOptions(window_s=window_s), seed=seed, **moving)
    loop.run()
    return ClusterResult(loop)


def serve_all(
    cases: Iterable[tuple[int, Scenario]], methods: Sequence[str], label: str, **moving
) -> MethodRuns:
    """Every method on every (seed, case)."""
    rows: dict[str, list[Row]] = {method: [] for method in methods}
    for seed, case in cases:
        for method in methods:
            rows[method].append(serve(case, method, seed, **moving).row())
        shown = ", ".join(f"{m} {found[-1][MEAN]:.3f}" for m, found in rows.items())
        print(f"{label}, seed {seed}: {shown}", flush=True)
    return MethodRuns(rows)


def cases_of(settings: Runs, **wanted) -> list[tuple[int, Scenario]]:
    """A case for every seed, as the settings and `wanted` say."""
    names = ("model", "workload", "interval_s", "requests_per_server")
    given = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return [(s, build_scenario(**given | wanted, seed=s)) for s in settings.all_seeds]
