"""CoServe in computed time: how often experts are used, an empty start, and waiting."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import check_known, check_positive
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.coserve.coe.presets import get_preset
from moe_edge.papers.coserve.simulate.coe_case import CoeCase
from moe_edge.papers.coserve.studies.entry import (
    OURS,
    PAPER,
    REASON,
    SAMBA,
    OnTasks,
    median_row,
    simulated,
)
from moe_edge.papers.coserve.workload.coe_tasks import DECAY, task_graph

SHARES = (0.5, 0.9, 0.99)  # of the uses
ByBound = Mapping[str, Mapping[float, float]]  # machine -> bound of waiting -> measure
WHY = "The paper gives no frequencies of its components; ours are p_i ~ exp(-i / d)."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves(OnTasks):
    """The size of figure 11.

    Attributes:
      decays: of the frequencies; the first task's board is drawn.
    """

    seeds: int = 1
    tasks: Sequence[str] = ("a1",)
    decays: Sequence[float] = (20.0, 26.0, 32.0, 40.0, 50.0)


def measure_curves(settings: Curves) -> Findings:
    """Cumulated usage of the experts, most used first."""
    curves, rows, needed = {}, [], {}
    for decay in settings.decays:
        graph = task_graph(settings.tasks[0], settings.seed, decay)
        uses_E = np.sort(graph.probability_E())[::-1]
        curve_E = np.cumsum(uses_E) / uses_E.sum()
        name = f"exp(-i/{decay:g})"
        curves[name] = curve_E
        counts = [int(np.searchsorted(curve_E, share)) + 1 for share in SHARES]
        needed[name] = dict(zip(SHARES, counts, strict=True))
        for share, count in needed[name].items():
            rows.append(metric(name, f"experts of {share:.0%} of the uses", count, "1"))
    E = len(next(iter(curves.values())))
    curves["equal"] = np.arange(1, E + 1) / E
    curves["one only"] = np.ones(E)
    usual = needed.get(f"exp(-i/{DECAY:g})", next(iter(needed.values())))
    said = ", ".join(f"{n} experts {share:.0%}" for share, n in usual.items())
    between = all(
        (curves["equal"] <= curve + 1e-9).all() and (np.diff(curve, 2) < 1e-9).all()
        for curve in curves.values()
    )
    return simulated(
        settings,
        answer=f"Of {E} experts the most used have a share of the uses: {said}.",
        metrics=rows,
        checks={"every curve is concave, between the linear and the step": between},
        ours={"experts by share of uses": needed},
        plot=lambda path: draw_panels(
            path,
            [
                Panel(
                    "Most used experts first",
                    "share of the uses",
                    list(range(1, E + 1)),
                    curves,
                    x_label="experts",
                )
            ],
            title="Usage of experts (computed)",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity(OnTasks):
    """The size of the study.

    Attributes:
      machines: presets; policies: what is compared, with the first one.
      decays: of the frequencies; waits_s: bounds of waiting under affinity.
    """

    rules = OnTasks.rules | {"waits_s": check_positive}
    machines: Sequence[str] = ("numa", "uma")
    tasks: Sequence[str] = ("a1", "b2")
    policies: Sequence[str] = (SAMBA, PAPER, OURS)
    decays: Sequence[float] = (20.0, 26.0, 32.0, 40.0, 50.0)
    waits_s: Sequence[float] = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


class _Table:
    """Medians over tasks and seeds, of each measure of (machine, case, policy)."""

    def __init__(self):
        self.values: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def add(self, at: tuple[str, str, str], case: CoeCase) -> None:
        """Serves a case by a policy."""
        run = case.run(at[2])
        found = {"throughput": run.throughput_per_s, "switches": run.switches}
        found["longest wait"] = max(run.wait_s)
        least = case.distinct(at[2])
        if at[2] != SAMBA and least:
            found["switches / least"] = run.switches / least
        values = self.values.setdefault(at, {})
        for name, value in found.items():
            values.setdefault(name, []).append(value)

    def median(self, at: tuple[str, str, str], name: str) -> float:
        return float(np.median(self.values[at][name]))

    def rows(self) -> list[dict[str, Any]]:
        units = {"throughput": "requests/s", "longest wait": "s"}
        return [
            median_row(
                policy, f"{name}, {machine}, {case}", values, units.get(name, "1")
            )
            for (machine, case, policy), found in self.values.items()
            for name, values in found.items()
        ]


def measure_sensitivity(settings: Sensitivity) -> Findings:
    """All policies by frequencies, with an empty start, and by the bound of waiting."""
    table = _Table()
    for machine in settings.machines:
        _serve(table, settings, machine)
        print(f"{machine}: served", flush=True)
    decays = {
        machine: {
            policy: [
                table.median((machine, _decay(d), policy), "throughput")
                / table.median((machine, _decay(d), settings.policies[0]), "throughput")
                for d in settings.decays
            ]
            for policy in settings.policies[1:]
        }
        for machine in settings.machines
    }
    spans = "; ".join(
        f"{machine} "
        + ", ".join(f"{p} {min(r):.2g}-{max(r):.2g}" for p, r in found.items())
        for machine, found in decays.items()
    )
    switches = _by_bound(table, settings, "switches")
    longest_s = _by_bound(table, settings, "longest wait")
    ours = {
        "throughput over first, by decay": decays,
        "switches by bound of waiting": switches,
        "longest wait by bound of waiting, s": longest_s,
        "empty": _empty(table, settings),
    }
    low, high = min(settings.decays), max(settings.decays)
    return simulated(
        settings,
        answer=f"Over {settings.policies[0]}, frequencies exp(-i/{low:g}) to "
        f"exp(-i/{high:g}): {spans} times.",
        details=[
            *(
                f"{machine}, switches of {OURS} by bound of waiting (longest wait): "
                + ", ".join(
                    f"{s:g} s {n:.0f} ({longest_s[machine][s]:.3g} s)"
                    for s, n in found.items()
                )
                + "."
                for machine, found in switches.items()
            ),
            *(
                f"{machine}, starting empty, requests/s: "
                + ", ".join(f"{p} {v:.3g}" for p, v in found.items())
                + "."
                for machine, found in ours["empty"].items()
            ),
        ],
        metrics=table.rows(),
        baselines=[p for p in settings.policies if p not in (PAPER, OURS)],
        limits=[
            "Rows are medians over tasks and seeds together.",
            "A bound of waiting is kept where requests come no faster than they are "
            "served. These do, so waits go beyond a short one.",
        ],
        ours=ours,
        plot=lambda path: draw_panels(
            path,
            _panels(decays, switches, settings),
            title="Sensitivity (simulated)",
        ),
        summary={
            "throughput_over_first": decays,
            "switches_by_bound": switches,
            "longest_wait_s_by_bound": longest_s,
        },
    )


def check_policies(settings: Sensitivity) -> None:
    """The bound of waiting is ours."""
    check_known("policy of the bound of waiting", OURS, settings.policies)


def _serve(table: _Table, settings: Sensitivity, machine: str) -> None:
    built = get_preset(machine)
    for task in settings.tasks:
        given = task, machine, built
        for decay in settings.decays:
            for case in settings.cases(*given, decay):
                for policy in settings.policies:
                    table.add((machine, _decay(decay), policy), case)
        for case in settings.cases(*given, start_empty=True):
            for policy in settings.policies:
                table.add((machine, "empty start", policy), case)
        for wait_s in settings.waits_s:
            for case in settings.cases(*given, max_wait_s=wait_s):
                table.add((machine, f"bound of {wait_s:g} s", OURS), case)


def _decay(decay: float) -> str:
    return f"exp(-i/{decay:g})"


def _by_bound(table: _Table, settings: Sensitivity, name: str) -> ByBound:
    """A measure of ours."""
    return {
        machine: {
            s: table.median((machine, f"bound of {s:g} s", OURS), name)
            for s in settings.waits_s
        }
        for machine in settings.machines
    }


def _empty(table: _Table, settings: Sensitivity) -> dict[str, dict[str, float]]:
    """Machine -> policy -> throughput."""
    return {
        machine: {
            policy: table.median((machine, "empty start", policy), "throughput")
            for policy in settings.policies
        }
        for machine in settings.machines
    }


def _panels(
    decays: Mapping[str, Mapping], switches: ByBound, settings: Sensitivity
) -> list[Panel]:
    lines = {
        f"{policy}, {machine}": values
        for machine, found in decays.items()
        for policy, values in found.items()
    }
    bounds = list(settings.waits_s)
    counts = {machine: list(found.values()) for machine, found in switches.items()}
    return [
        Panel(
            f"Throughput over {settings.policies[0]}'s",
            "1",
            list(settings.decays),
            lines,
            x_label="decay of the frequencies, in types",
        ),
        Panel(
            f"Switches of {OURS}",
            "loads",
            bounds,
            counts,
            x_label="bound of waiting, s",
            log_x=True,
        ),
    ]


STUDIES = {
    "coserve_fig11": Study(
        name="coserve_fig11",
        question="How is the usage of experts distributed (CoServe, figure 11)?",
        settings=Curves,
        measure=measure_curves,
        claim=Claim(
            source="CoServe, section 4.4, figure 11",
            paper={"trend": "the actual curve lies between linear and step"},
            why=WHY,
            not_comparable=REASON,
        ),
    ),
    "coserve_sensitivity": Study(
        name="coserve_sensitivity",
        question="What do frequencies, an empty start and a bound of waiting change?",
        settings=Sensitivity,
        check=check_policies,
        measure=measure_sensitivity,
        claim=Claim(
            source="CoServe, section 5.2, figures 13 and 14",
            paper={"throughput over Samba-CoE": {"numa": "4.5-10.5", "uma": "4.6-12"}},
            why=WHY,
            not_comparable=REASON,
        ),
    ),
}
