"""CoServe, figures 13 to 16 in computed time: throughput and switches by policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.studies.entry import (
    OURS,
    PAPER,
    SYSTEMS,
    OnMachines,
    Policy,
    tell,
)

BOUND = "no fewer loads in any order"
EQUAL = "every policy gave each request the same experts"
LEAST = "no policy on all executors loaded less than the bound"
ALL_SYSTEMS = "Samba-CoE's three systems"  # as the paper counts its ratios


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated(OnMachines):
    """The size of the study.

    Attributes:
      policies: what is compared, with the first one.
    """

    policies: Sequence[Policy] = (
        *("samba", "samba_no_tier", "samba_fifo", "samba_parallel"),
        *("coserve", "affinity"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation(Simulated):
    """As Simulated, of CoServe's parts."""

    policies: Sequence[Policy] = (
        *("none", "em", "em_ra", "coserve"),
        *("coserve_queued", "affinity"),
    )


def measure(settings: Simulated, rows: Rows) -> None:
    """All policies on all tasks, machines and disks."""
    rows.checks |= {EQUAL: True, LEAST: True}
    base, policies = settings.policies[0], settings.policies
    for place, (machine, built) in settings.places().items():
        times: dict[str, list[list[float]]] = {}  # policy -> by task, a seed each
        for task in settings.tasks:
            cases = list(settings.cases(task, machine, built))
            runs = {p: [case.run(p) for case in cases] for p in policies}
            _check(rows, runs)
            for policy, found in runs.items():
                rate = [run.throughput_per_s for run in found]
                times.setdefault(policy, []).append(rate)
                values = {"throughput_per_s": of_seeds(rate)}
                values["switches"] = of_seeds([run.switches for run in found])
                if not RECIPES[policy].one_lane:
                    pairs = zip(found, cases, strict=True)
                    least = [
                        run.switches / case.distinct(policy) for run, case in pairs
                    ]
                    values["over_least"] = of_seeds(least)
                    rows.checks[LEAST] &= bool(min(least) >= 1)
                rows("runs", place, task, policy, **values)
            bound = of_seeds([case.distinct() for case in cases])
            rows("runs", place, task, BOUND, switches=bound)
            print(f"{place}, {task}: served", flush=True)
        for policy in (p for p in policies if p != base):
            rows("over", place, policy, base, **_span(times, policy, [base]))
        if {PAPER, *SYSTEMS} <= {*policies}:
            rows("over", place, PAPER, ALL_SYSTEMS, **_span(times, PAPER, SYSTEMS))
    tell(rows, settings, [p for p in policies if p not in (PAPER, OURS)])


def _check(rows: Rows, runs: Mapping[str, Sequence[CoeRun]]) -> None:
    """Whether all policies gave each request of a seed the same chain of experts."""
    for of_seed in zip(*runs.values(), strict=True):
        rows.checks[EQUAL] &= all(run.chains == of_seed[0].chains for run in of_seed)


def _span(
    times: Mapping[str, Sequence], policy: str, others: Sequence[str]
) -> dict[str, float]:
    """The least and the largest throughput over others', over tasks; medians over
    seeds."""
    ratios = [
        float(np.median(np.divide(mine, its)))
        for other in others
        for mine, its in zip(times[policy], times[other], strict=True)
    ]
    return {"low": min(ratios), "high": max(ratios)}


def derive(tables: Tables) -> dict[str, Any]:
    """The policies that the answer names."""
    over = tables["over"]
    shown = over[over.policy.isin((PAPER, OURS)) & (over.base != ALL_SYSTEMS)]
    return {"shown": shown, "base": over.base.iloc[0], "places": over.place.unique()}


FRAMES = {
    "runs": frame(
        "place task policy", "throughput_per_s:requests/s switches over_least"
    ),
    "over": frame("place policy base", "low high"),
}
STUDIES = {
    name: Study(name, settings, measure, FRAMES, derive)
    for name, settings in (("coserve_fig13", Simulated), ("coserve_fig15", Ablation))
}
