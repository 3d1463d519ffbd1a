"""CoServe, figures 13 to 16 in computed time: throughput and switches by policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.studies.entry import (
    OURS,
    OVER_SYSTEMS,
    PAPER,
    REASON,
    SYSTEMS,
    OnMachines,
    median_row,
    simulated,
)

BOUND = "no fewer loads in any order"
TIER = (
    "Samba's tier holds what left its pool, in one place only, and what it hands back "
    "costs a third of a load from the disk (NUMA): ratios to it follow that number."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated(OnMachines):
    """The size of the study.

    Attributes:
      policies: what is compared, with the first one.
    """

    policies: Sequence[str] = (
        *("samba", "samba_no_tier", "samba_fifo", "samba_parallel"),
        *("coserve", "affinity"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation(Simulated):
    """As Simulated, of CoServe's parts."""

    policies: Sequence[str] = ("none", "em", "em_ra", "coserve", "affinity")


class Runs:
    """Throughput and switches of every (place, task, policy), by seed.

    A place is a machine with one disk, or with parallel loads.

    Attributes:
      throughput, switches: (place, task, policy) -> one number a seed.
      over: (place, task, policy on all executors) -> switches over those that its
        start makes necessary.
      equal: whether every policy gave each request the same chain of experts.
    """

    def __init__(self, settings: Simulated):
        self.throughput: dict[tuple[str, str, str], list[float]] = {}
        self.switches: dict[tuple[str, str, str], list[int]] = {}
        self.over: dict[tuple[str, str, str], list[float]] = {}
        self.equal = True
        for place, (machine, built) in settings.places().items():
            for task in settings.tasks:
                for case in settings.cases(task, machine, built):
                    self._serve(case, place, task, settings.policies)
                self._tell(place, task, settings.policies)

    def _serve(
        self, case: CoeCase, place: str, task: str, policies: Sequence[str]
    ) -> None:
        chains = None
        for policy in policies:
            run, key = case.run(policy), (place, task, policy)
            self.throughput.setdefault(key, []).append(run.throughput_per_s)
            self.switches.setdefault(key, []).append(run.switches)
            if not RECIPES[policy].one_lane:
                over = run.switches / case.distinct(policy)
                self.over.setdefault(key, []).append(over)
            self.equal &= chains in (None, run.chains)
            chains = run.chains
        self.switches.setdefault((place, task, BOUND), []).append(case.distinct())

    def _tell(self, place: str, task: str, policies: Sequence[str]) -> None:
        found = [
            f"{p} {np.median(self.throughput[place, task, p]):.3g}" for p in policies
        ]
        print(f"{place}, {task}: requests/s: {', '.join(found)}", flush=True)

    def ratios(self, place: str, policy: str, to: str) -> list[float]:
        """Throughput over another policy's, a median over seeds each task."""
        return [
            float(np.median(np.divide(found, self.throughput[place, task, to])))
            for (where, task, name), found in self.throughput.items()
            if (where, name) == (place, policy)
        ]

    def metrics(self) -> list[dict[str, Any]]:
        """Medians over seeds."""
        rows = []
        for (place, task, policy), found in self.throughput.items():
            name = f"throughput, {place}, {task}"
            rows.append(median_row(policy, name, found, "requests/s"))
        for (place, task, policy), found in self.switches.items():
            rows.append(median_row(policy, f"switches, {place}, {task}", found, "1"))
        for (place, task, policy), found in self.over.items():
            name = f"switches / least, {place}, {task}"
            rows.append(median_row(policy, name, found, "1"))
        return rows


def measure(settings: Simulated) -> Findings:
    """All policies on all tasks, machines and disks."""
    runs, base = Runs(settings), settings.policies[0]
    spans = {
        place: {
            policy: _span(runs.ratios(place, policy, base))
            for policy in settings.policies
            if policy != base
        }
        for place in settings.places()
    }
    over_systems = {
        place: _span([r for to in SYSTEMS for r in runs.ratios(place, PAPER, to)])
        for place in (spans if {PAPER, *SYSTEMS} <= {*settings.policies} else ())
    }
    shown = [p for p in (PAPER, OURS) if p in settings.policies and p != base]
    answer = "; ".join(
        f"{place}: " + ", ".join(f"{policy} {spans[place][policy]}" for policy in shown)
        for place in spans
    )
    return simulated(
        settings,
        answer=f"Times {base}'s throughput, over the tasks: {answer}.",
        details=[
            f"{place}, throughput over {base}'s: "
            + ", ".join(f"{policy} {span}" for policy, span in found.items())
            + "."
            for place, found in spans.items()
        ]
        + [
            f"{place}, {PAPER}'s {OVER_SYSTEMS} (as the paper counts): {span}."
            for place, span in over_systems.items()
        ],
        metrics=runs.metrics(),
        limits=[TIER],
        baselines=[p for p in settings.policies if p not in (PAPER, OURS)],
        checks={
            "every policy gave each request the same experts": runs.equal,
            "no policy on all executors loaded less than the bound": all(
                over >= 1 for found in runs.over.values() for over in found
            ),
        },
        ours={OVER_SYSTEMS: over_systems, "throughput": spans},
        plot=lambda path: draw_panels(
            path, panels(runs, settings), title="CoServe's tasks (simulated)"
        ),
        summary={"throughput_over_first": spans},
    )


def panels(runs: Runs, settings: Simulated) -> list[Panel]:
    """Throughput and switches of each place."""

    def series(values: Mapping, place: str, names: Sequence[str]) -> dict:
        return {
            name: [np.median(values[place, task, name]) for task in settings.tasks]
            for name in names
        }

    found = []
    for place in settings.places():
        tasks, names = list(settings.tasks), settings.policies
        rates = series(runs.throughput, place, names)
        counts = series(runs.switches, place, [*names, BOUND])
        found.append(Panel(f"{place}: throughput", "requests/s", tasks, rates))
        found.append(Panel(f"{place}: switches", "loads", tasks, counts, log=True))
    return found


def _span(values: Sequence[float]) -> str:
    """The least and the largest, such as `3.7-4.7` or `3.7-12.4`."""
    low, high = (
        f"{value:.{2 if value < 10 else 3}g}" for value in (min(values), max(values))
    )
    return low if low == high else f"{low}-{high}"


WHY = (
    "The ratios follow what a load from host memory costs Samba, how often components "
    "occur, and what batches leave for experts; none of it is in the paper. What 4.6 "
    "to 12 on UMA would need: entry coserve_uma."
)
STUDIES = {
    "coserve_fig13": Study(
        name="coserve_fig13",
        question="How much faster than Samba-CoE, with how many switches (CoServe, "
        "figures 13 and 14)?",
        settings=Simulated,
        measure=measure,
        claim=Claim(
            source="CoServe, section 5.2, figures 13 and 14",
            paper={
                OVER_SYSTEMS: {"numa": "4.5-10.5", "uma": "4.6-12"},
                "switches, numa, b2": {"samba": 1060, "coserve": 65},
                "switches, uma, b1": {"samba": 293, "coserve": 63},
            },
            why=WHY,
            not_comparable=REASON,
        ),
    ),
    "coserve_fig15": Study(
        name="coserve_fig15",
        question="What does each part of CoServe give (figures 15 and 16)?",
        settings=Ablation,
        measure=measure,
        claim=Claim(
            source="CoServe, section 5.3, figures 15 and 16",
            paper={"trend": "None < EM < EM+RA < CoServe; switches fall as it rises"},
            why="The figures have no numbers in their text. " + WHY,
            not_comparable=REASON,
        ),
    ),
}
