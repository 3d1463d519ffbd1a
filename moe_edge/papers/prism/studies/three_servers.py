"""Prism on three live servers behind a slow network, each run beside the simulator.

Real processes serve the default model; `tc` limits their links. Every seed is one run:
its methods follow each other over the same processes, and all answer the same requests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.bench.registry import later
from moe_edge.bench.study import Study
from moe_edge.core.run_folder import RunFolder
from moe_edge.metrics.frames import Tables, frame
from moe_edge.papers.prism.studies.live_seeds import (
    LiveMethods,
    PlacerName,
    check,
    each_seed,
)
from moe_edge.papers.prism.studies.live_shares import time_shares
from moe_edge.papers.prism.studies.served import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
)
from moe_edge.papers.prism.studies.table2 import TABLE_2
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.run_recorded import run_recorded

ERROR_PCT, WORST_PCT = 10.0, 20.0  # of the simulator
REAL, COMPUTED = "measured", "simulated"
METHODS = (OPTIMUM, OURS, PRISM, EPLB, "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreeServers(LiveMethods):
    """`LiveMethods` names all; methods are placers, whose calls can be simulated."""

    methods: Sequence[PlacerName] = METHODS


@dataclasses.dataclass(frozen=True)
class Runs:
    """What all seeds gave.

    Attributes:
      measured, simulated: rows of every method and seed.
      shares: method -> of every seed the shares of time (`live_shares.PARTS`).
      facts: of every seed, its cluster.json.
    """

    measured: MethodRuns
    simulated: MethodRuns
    shares: Mapping[str, Sequence[Mapping[str, float]]]
    facts: Sequence[Mapping[str, Any]]

    def errors(self, method: str) -> np.ndarray:
        """float64 [seeds]: the simulated mean latency's error in percent."""
        found = self.simulated.values(method) / self.measured.values(method)
        return 100 * (found - 1)


def run_all(settings: ThreeServers, folder: Path) -> Runs:
    """Runs every seed live, then in the simulator.

    Raises:
      MoeEdgeError: a run lost requests, or cannot be made here.
    """
    methods = settings.methods
    measured, simulated, shares = ({m: [] for m in methods} for _ in range(3))
    all_facts = []
    for _, where, facts in each_seed(settings, folder):
        all_facts.append(facts)
        beside = RunFolder(where / "simulated")
        rows = run_recorded(beside, str(where), None, LoopOptions())["methods"]
        for method in methods:
            row = facts["rows"][method]
            measured[method].append(row)
            simulated[method].append(rows[method])
            shares[method].append(time_shares(where, method, row))
    return Runs(MethodRuns(measured), MethodRuns(simulated), shares, all_facts)


def derive(tables: Tables) -> dict[str, Any]:
    """The fastest method, the simulator's errors, and the paper's servers."""
    runs = tables["runs"].set_index("method")
    real, computed = (runs[runs.kind == kind].mean_s for kind in (REAL, COMPUTED))
    errors, fastest = tables["errors"], real.idxmin()
    worst_pct = errors.error_pct.abs().max()
    same_order = all(
        computed[a] < computed[b]
        for a in real.index
        for b in real.index
        if real[a] * (1 + ERROR_PCT / 100) < real[b]
    )
    checks = {
        f"simulated within {pct:.0f} % of measured": worst_pct <= pct
        for pct in (ERROR_PCT, WORST_PCT)
    }
    order = f"the simulator's order where methods differ by more than {ERROR_PCT:.0f} %"
    best = runs[(runs.index == fastest) & (runs.kind == REAL)].reset_index()
    return {
        "best": best.iloc[0].to_dict(),
        "over_best": (real / real.min()).rename("over").reset_index(),
        "worst_pct": worst_pct,
        "paper": [
            {"method": method, "seconds": list(seconds)}
            for method, seconds in TABLE_2["bigbench", "deepseek_v2_lite"].items()
        ],
        "checks": checks | {order: same_order},
    }


FRAMES = {
    "runs": frame("method kind", "local mean_s remote_calls"),
    "errors": frame("method", "error_pct:%"),
    "time": frame("method part", "share"),
    "servers": frame("method server", "seconds:s"),
    "changes": frame("method", "latency remote"),
    "compiled": frame("", "programs"),
}
STUDY = Study(
    "prism_three_servers",
    ThreeServers,
    later("papers.prism.studies.three_servers_entry.measure"),
    FRAMES,
    derive,
    check=check,
    start={"seeds": 1},
)
