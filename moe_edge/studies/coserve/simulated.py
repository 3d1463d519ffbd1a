"""CoServe, figures 13 to 16 in computed time: throughput and switches by policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.coe.presets import PRESETS, SOURCE
from moe_edge.core.checks import check_known, check_positive
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.schedule.coe_recipes import RECIPES
from moe_edge.simulate.coe_case import CoeWork, MachineOptions
from moe_edge.simulate.coe_run import Case
from moe_edge.studies.settings import RULES, StudySettings
from moe_edge.studies.study import Claim, Findings, Study
from moe_edge.workload.coe_tasks import DECAY, RECORD_BYTES, TASKS

SAMBA, PAPER, OURS = "samba", "coserve", "affinity"
SPREAD = "half range of seeds"
BOUND = "no fewer loads in any order"
REASON = (
    "Costs of networks and loads are assumed (the paper gives disks and memory only), "
    "and so are frequencies of components, of detectors, of damages. Compare ratios."
)
LIMITS = (
    "Simulated: no network was computed and no file read. Deciding takes no time.",
    "Samba's tier holds what left its pool, in one place only, and what it hands back "
    "costs a third of a load from the disk (NUMA): ratios to it follow that number.",
    "Loads do not overlap with the same executor's computing, under any policy.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated(StudySettings):
    """The size of the study.

    Attributes:
      seed, seeds: of boards and requests; rows are medians over them.
      machines: presets; tasks: of the paper.
      policies: what is compared.
      decay: of the frequencies of components, in types.
    """

    rules = RULES | {
        "machines": lambda name, value: check_known("machine", value, PRESETS),
        "tasks": lambda name, value: check_known("task", value, TASKS),
        "policies": lambda name, value: check_known("policy", value, RECIPES),
        "decay": check_positive,
    }
    seed: int = 0
    seeds: int = 5
    machines: Sequence[str] = ("numa", "uma")
    tasks: Sequence[str] = tuple(TASKS)
    policies: Sequence[str] = (
        *("samba", "samba_no_tier", "samba_fifo", "samba_parallel"),
        *("coserve", "affinity"),
    )
    decay: float = DECAY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation(Simulated):
    """As Simulated, of CoServe's parts."""

    policies: Sequence[str] = ("none", "em", "em_ra", "coserve", "affinity")


class Runs:
    """Throughput and switches of every (machine, task, policy), by seed.

    Attributes:
      throughput, switches: (machine, task, policy) -> one number a seed.
      equal: whether every policy gave each request the same chain of experts.
    """

    def __init__(self, settings: Simulated):
        self.throughput: dict[tuple[str, str, str], list[float]] = {}
        self.switches: dict[tuple[str, str, str], list[int]] = {}
        self.equal = True
        for machine in settings.machines:
            built = MachineOptions(machine).build()
            for task in settings.tasks:
                for seed in range(settings.seed, settings.seed + settings.seeds):
                    work = CoeWork(task=task, decay=settings.decay)
                    case = Case(*work.build(machine, seed), built)
                    self._serve(case, machine, task, settings.policies)
                self._tell(machine, task, settings.policies)

    def _serve(
        self, case: Case, machine: str, task: str, policies: Sequence[str]
    ) -> None:
        chains = None
        for policy in policies:
            run, key = case.run(policy), (machine, task, policy)
            self.throughput.setdefault(key, []).append(run.throughput_per_s)
            self.switches.setdefault(key, []).append(run.switches)
            self.equal &= chains in (None, run.chains)
            chains = run.chains
        least = case.bounds()["distinct"]
        self.switches.setdefault((machine, task, BOUND), []).append(least)

    def _tell(self, machine: str, task: str, policies: Sequence[str]) -> None:
        found = [
            f"{p} {np.median(self.throughput[machine, task, p]):.3g}" for p in policies
        ]
        print(f"{machine}, {task}: requests/s: {', '.join(found)}", flush=True)

    def ratios(self, machine: str, policy: str, to: str) -> list[float]:
        """Throughput over another policy's, a median over seeds each task."""
        return [
            float(np.median(np.divide(found, self.throughput[machine, task, to])))
            for (where, task, name), found in self.throughput.items()
            if (where, name) == (machine, policy)
        ]

    def metrics(self) -> list[dict[str, Any]]:
        """Medians over seeds."""
        rows = []
        for (machine, task, policy), found in self.throughput.items():
            name = f"throughput, {machine}, {task}"
            rows.append(_median(policy, name, found, "requests/s"))
        for (machine, task, policy), found in self.switches.items():
            rows.append(_median(policy, f"switches, {machine}, {task}", found, "1"))
        return rows


def measure(settings: Simulated) -> Findings:
    """All policies on all tasks and machines."""
    runs, base = Runs(settings), settings.policies[0]
    spans = {
        machine: {
            policy: _span(runs.ratios(machine, policy, base))
            for policy in settings.policies
            if policy != base
        }
        for machine in settings.machines
    }
    beaten = [
        loads >= least
        for (machine, task, policy), found in runs.switches.items()
        for loads, least in zip(found, runs.switches[machine, task, BOUND], strict=True)
        if policy not in (BOUND, SAMBA, "samba_no_tier", "samba_fifo")
    ]
    shown = [p for p in (PAPER, OURS) if p in settings.policies and p != base]
    answer = "; ".join(
        f"{machine}: "
        + ", ".join(f"{policy} {spans[machine][policy]} times" for policy in shown)
        for machine in settings.machines
    )
    return Findings(
        answer=f"Throughput over {base}'s, least and largest of the tasks: {answer}.",
        details=[
            f"{machine}, throughput over {base}'s: "
            + ", ".join(f"{policy} {span}" for policy, span in found.items())
            + "."
            for machine, found in spans.items()
        ],
        model={
            "name": ", ".join(RECORD_BYTES),
            "params": {name: size // 4 for name, size in RECORD_BYTES.items()},
            "weights": "none: sizes only",
        },
        workload={
            "comparable": False,
            "why_not_comparable": REASON,
            **dataclasses.asdict(settings),
            "hardware": SOURCE,
        },
        metrics=runs.metrics(),
        limits=LIMITS,
        kind="simulated",
        cost_model_source="preset",
        seeds=list(range(settings.seed, settings.seed + settings.seeds)),
        baselines=[p for p in settings.policies if p not in (PAPER, OURS)],
        checks={
            "every policy gave each request the same experts": runs.equal,
            "no policy on all executors loaded less than the bound": all(beaten),
        },
        ours={"throughput": spans},
        plot=lambda path: draw_panels(
            path, panels(runs, settings), title="CoServe's tasks (simulated)"
        ),
        summary={"throughput_over_first": spans},
    )


def panels(runs: Runs, settings: Simulated) -> list[Panel]:
    """Throughput and switches of each machine."""

    def series(values: Mapping, machine: str, names: Sequence[str]) -> dict:
        return {
            name: [np.median(values[machine, task, name]) for task in settings.tasks]
            for name in names
        }

    found = []
    for machine in settings.machines:
        tasks, names = list(settings.tasks), settings.policies
        rates = series(runs.throughput, machine, names)
        counts = series(runs.switches, machine, [*names, BOUND])
        found.append(Panel(f"{machine}: throughput", "requests/s", tasks, rates))
        found.append(Panel(f"{machine}: switches", "loads", tasks, counts, log=True))
    return found


def _median(policy: str, name: str, found: Sequence[float], unit: str) -> dict:
    spread = (SPREAD, float(np.ptp(found)) / 2)
    return metric(policy, name, float(np.median(found)), unit, len(found), spread)


def _span(values: Sequence[float]) -> str:
    """The least and the largest, such as `3.7-4.7`."""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low}-{high}"


WHY = (
    "The ratios follow what a load from host memory costs Samba, how often components "
    "occur, and what batches leave for experts; none of it is in the paper. On UMA no "
    "order needs fewer than a third of Samba's loads here, so 4.6-12 cannot come of it."
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
                "throughput over Samba-CoE": {"numa": "4.5-10.5", "uma": "4.6-12"},
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
