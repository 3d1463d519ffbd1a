"""CoServe in computed time: how often experts are used, an empty start, and waiting."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.derived import over, spans
from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.core.checks import check_known
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame, of_seeds
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.studies.entry import (
    OURS,
    PAPER,
    SAMBA,
    MachineName,
    OnTasks,
    Policy,
    Task,
    tell,
)
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, task_graph

SHARES = (0.5, 0.9, 0.99)  # of the uses
BETWEEN = "every curve is concave, between the linear and the step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves(OnTasks):
    """The size of figure 11.

    Attributes:
      decays: of the frequencies; the first task's board is drawn.
    """

    seeds: int = 1
    tasks: Sequence[Task] = ("a1",)
    decays: Sequence[Positive] = (20.0, 26.0, 32.0, 40.0, 50.0)


def measure_curves(settings: Curves, rows: Rows) -> None:
    """Cumulated usage of the experts, most used first."""
    rows.checks[BETWEEN] = True
    for decay in settings.decays:
        graph = task_graph(settings.tasks[0], settings.seed, decay)
        uses_E = np.sort(graph.probability_E())[::-1]
        curve_E = np.cumsum(uses_E) / uses_E.sum()
        E, name = len(curve_E), f"exp(-i/{decay:g})"
        equal_E = np.arange(1, E + 1) / E
        rows.checks[BETWEEN] &= bool((equal_E <= curve_E + 1e-9).all())
        rows.checks[BETWEEN] &= bool((np.diff(curve_E, 2) < 1e-9).all())
        for share in SHARES:
            count = int(np.searchsorted(curve_E, share)) + 1
            rows("needed", name, share, decay=decay, all_experts=E, experts=count)
    tell(rows, settings)


def derive_curves(tables: Tables) -> dict[str, Any]:
    """The curve that stands for the paper's boards."""
    needed = tables["needed"]
    usual = needed[needed.decay == DECAY]
    return {"usual": usual if len(usual) else needed.iloc[: len(SHARES)]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity(OnTasks):
    """The size of the study.

    Attributes:
      machines: presets; policies: what is compared, with the first one.
      decays: of the frequencies; waits_s: bounds of waiting under affinity.
    """

    machines: Sequence[MachineName] = ("numa", "uma")
    tasks: Sequence[Task] = ("a1", "b2")
    policies: Sequence[Policy] = (SAMBA, PAPER, OURS)
    decays: Sequence[Positive] = (20.0, 26.0, 32.0, 40.0, 50.0)
    waits_s: Sequence[Positive] = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


def measure_sensitivity(settings: Sensitivity, rows: Rows) -> None:
    """All policies by frequencies, with an empty start, and by the bound of waiting."""
    for machine in settings.machines:
        sweeps = [
            *(("decay", at, {"decay": at}) for at in settings.decays),
            ("empty start", None, {"start_empty": True}),
            *(("bound of waiting", at, {"max_wait_s": at}) for at in settings.waits_s),
        ]
        for sweep, at, options in sweeps:
            waits = sweep == "bound of waiting"
            for policy in (OURS,) if waits else settings.policies:
                found = _serve(settings, machine, policy, options)
                rows("runs", machine, sweep, at, policy, **found)
        print(f"{machine}: served", flush=True)
    tell(rows, settings, [p for p in settings.policies if p not in (PAPER, OURS)])


def _serve(
    settings: Sensitivity, machine: str, policy: str, options: Mapping[str, Any]
) -> dict[str, Estimate]:
    """Medians over tasks and seeds together."""
    found: dict[str, list[float]] = {}
    for task in settings.tasks:
        for case in settings.cases(task, machine, get_preset(machine), **options):
            run, least = case.run(policy), case.distinct(policy)
            values = {"throughput_per_s": run.throughput_per_s}
            values |= {"switches": run.switches, "longest_wait_s": max(run.wait_s)}
            if policy != SAMBA and least:
                values["over_least"] = run.switches / least
            for name, value in values.items():
                found.setdefault(name, []).append(value)
    return {name: of_seeds(values) for name, values in found.items()}


def derive_sensitivity(tables: Tables) -> dict[str, Any]:
    """Throughput over the first policy's by decay, and what a bound of waiting does."""
    runs = tables["runs"]
    by_decay, base = runs[runs.sweep == "decay"], runs.policy.iloc[0]
    ratios = over(by_decay, "throughput_per_s", base, "machine at")
    return {
        "base": base,
        "ours": OURS,
        "decays": by_decay["at"].unique(),
        "over_first": ratios,
        "spans": spans(ratios, "over", "machine policy"),
        "by_bound": runs[runs.sweep == "bound of waiting"],
        "empty": runs[runs.sweep == "empty start"],
    }


def check_policies(settings: Sensitivity) -> None:
    """The bound of waiting is ours."""
    check_known("policy of the bound of waiting", OURS, settings.policies)


NEEDED = frame("frequencies share", "decay:types all_experts experts")
RUNS = frame(
    "machine sweep at policy",
    "throughput_per_s:requests/s switches longest_wait_s over_least",
)
STUDIES = {
    "coserve_fig11": Study(
        *("coserve_fig11", Curves, measure_curves, {"needed": NEEDED}, derive_curves)
    ),
    "coserve_sensitivity": Study(
        *("coserve_sensitivity", Sensitivity, measure_sensitivity, {"runs": RUNS}),
        derive_sensitivity,
        check=check_policies,
    ),
}
