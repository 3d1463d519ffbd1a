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
from moe_edge.bench.study import Claim, Study
from moe_edge.core.checks import check_known
from moe_edge.core.run_folder import RunFolder
from moe_edge.papers.prism.studies.live_entry import NOT_COMPARABLE
from moe_edge.papers.prism.studies.live_seeds import LiveMethods, check, each_seed
from moe_edge.papers.prism.studies.live_shares import time_shares
from moe_edge.papers.prism.studies.served import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
)
from moe_edge.papers.prism.studies.table2 import TABLE_2
from moe_edge.place.placer import PLACERS
from moe_edge.simulate.cluster.loop import LoopOptions
from moe_edge.simulate.cluster.run_recorded import run_recorded

ERROR_PCT = 10.0  # of the simulator
METHODS = (OPTIMUM, OURS, PRISM, EPLB, "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreeServers(LiveMethods):
    """`LiveMethods` names all; methods are placers, whose calls can be simulated."""

    rules = LiveMethods.rules | {
        "methods": lambda name, value: check_known("method", value, PLACERS)
    }
    methods: Sequence[str] = METHODS


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

    def share(self, method: str, part: str) -> float:
        """Median over seeds of one part of the time."""
        return float(np.median([seed[part] for seed in self.shares[method]]))

    @property
    def worst_pct(self) -> float:
        """Largest error of a method's median over seeds."""
        return max(abs(float(np.median(self.errors(m)))) for m in self.measured.rows)

    def same_order(self) -> bool:
        """Whether any two methods stand in the order that was measured, if these
        differ by more than ERROR_PCT."""
        real = {m: self.measured.median(m) for m in self.measured.rows}
        computed = {m: self.simulated.median(m) for m in self.simulated.rows}
        return all(
            computed[a] < computed[b]
            for a in real
            for b in real
            if real[a] * (1 + ERROR_PCT / 100) < real[b]
        )


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


TABLE = TABLE_2["bigbench", "deepseek_v2_lite"]
STUDY = Study(
    name="prism_three_servers",
    question="Do Prism's placements help three live servers behind a slow network, and "
    "does the simulator say so?",
    settings=ThreeServers,
    measure=later("papers.prism.studies.three_servers_entry.measure"),
    check=check,
    claim=Claim(
        source="Prism, table II (BIG-bench, DeepSeek-V2-Lite) and figure 6",
        paper={
            "seconds, server by server and mean": TABLE,
            "latency, change to EPLB": {
                PRISM: f"{100 * (TABLE[PRISM][3] / TABLE[EPLB][3] - 1):+.1f} %"
            },
            "trend of figure 6": "Prism computes most at home",
        },
        why="The best placement that these slots allow takes away about a fifth of the "
        "remote pairs of heterogeneous EPLB: our small model routes its tasks less "
        "narrowly than DeepSeek-V2-Lite routes BIG-bench's. And a request waits for "
        "others during a part of its time only; no placement saves the rest. So a "
        "request alone cannot gain 30.6 %. Queues multiply what each request gains, "
        "here as in the paper: see the share of time spent in them.",
        not_comparable=NOT_COMPARABLE,
    ),
)
