"""The root of launch/coserve.py: requests for many experts, policy by policy."""

import json
from collections.abc import Sequence
from typing import Any

from moe_edge.coe.case import CoeWork, MachineOptions, probability_E
from moe_edge.coe.machine import Machine
from moe_edge.coe.results import CoeRun, outputs, progress, row, run_events
from moe_edge.coe.setup import Setup, make_setup
from moe_edge.core.checks import ConfigError, check_from_zero
from moe_edge.core.events import write_events
from moe_edge.core.files import write_json, write_text
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.schedule.coe_recipes import chosen_recipes
from moe_edge.simulate import coe_bounds
from moe_edge.simulate.coe import CoeSimulator
from moe_edge.workload.coe_graph import CoeGraph
from moe_edge.workload.coe_tasks import CoeRequest


@root
@unpacked(work=CoeWork, options=MachineOptions)
def run_coserve(
    run: RunFolder,
    *,
    work: CoeWork,
    options: MachineOptions,
    policies: str = "samba,coserve,affinity",
    max_wait_s: float = 30.0,
    start_empty: bool = False,
    events: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves the same requests by every policy in computed time, and compares.

    Args:
      run: folder of `coserve.json`, `outputs_POLICY.jsonl` and, with `events`,
        `events_POLICY.jsonl`.
      work: who judges what; options: on what.
      policies: samba, samba_no_tier, samba_fifo, samba_parallel, none, em, em_ra,
        coserve, affinity, separated by commas; or `all`.
      max_wait_s: who has waited that long is next, under affinity; 0: no bound.
      start_empty: nothing is resident at first.
      events: write what was loaded, computed and evicted.
      seed: of a task's board and requests.
    Raises:
      MoeEdgeError: bad input.
    """
    check_from_zero("max_wait_s", max_wait_s)
    names, machine = chosen_recipes(policies), options.build()
    graph, requests = work.build(options.simulate, seed)
    case = Case(graph, requests, machine, start_empty, max_wait_s)
    for name in names:
        case.setup(name)
    if run.dry_run:
        return {"task": work.name, "policies": names}
    runs = {name: case.run(name) for name in names}
    for name in names:
        print(progress(name, runs[name]))
    answers = [found.answers for found in runs.values()]
    summary = {
        "task": work.name,
        "kind": "simulated",
        "policies": {name: row(found) for name, found in runs.items()},
        "bounds": case.bounds(runs.get("samba")),
        "distinct_experts": len(coe_bounds.uses(graph, requests)),
        "verdicts_equal": all(one == answers[0] for one in answers),
        "accuracy": None,
    }
    with run.writing() as folder:
        settings = vars(work) | vars(options) | {"seed": seed}
        stored = {"settings": settings, "source": machine.source, **summary}
        write_json(folder / "coserve.json", stored)
        for name, found in runs.items():
            text = "".join(
                json.dumps(line) + "\n" for line in outputs(graph, requests, found)
            )
            write_text(folder / f"outputs_{name}.jsonl", text)
            if events:
                told = run_events(found, graph.bytes_E.tolist())
                write_events(folder / f"events_{name}.jsonl", told)
    return summary


class Case:
    """The same requests on the same machine for every policy."""

    def __init__(
        self,
        graph: CoeGraph,
        requests: Sequence[CoeRequest],
        machine: Machine,
        start_empty: bool = False,
        max_wait_s: float = 0.0,
    ):
        self.graph, self.requests, self.machine = graph, requests, machine
        if not any(request.component in graph.rules for request in requests):
            raise ConfigError(
                f"none of the {len(requests)} requests is of a component that has a "
                "rule; give the graph that belongs to them"
            )
        self._share_E = probability_E(graph, requests)
        self._start_empty = start_empty
        self._options = {"max_wait_s": max_wait_s} if max_wait_s else {}

    def setup(self, name: str) -> Setup:
        """Queues, pools and tier of a policy at the start."""
        empty, options = self._start_empty, self._options
        return make_setup(
            *(name, self.graph, self.machine, self._share_E),
            start_empty=empty,
            options=options,
        )

    def run(self, name: str) -> CoeRun:
        simulator = CoeSimulator(self.graph, self.setup(name), self.machine.one_disk)
        return simulator.run(self.requests)

    def distinct(self, name: str = "coserve") -> int:
        """Loads without which a policy's start cannot do, in any order of requests."""
        used = coe_bounds.uses(self.graph, self.requests)
        return coe_bounds.distinct(used, self.setup(name).start)

    def bounds(self, samba: CoeRun | None = None) -> dict[str, float]:
        """What CoServe's layout cannot beat, and Samba's in its order of requests."""
        setup, alone = self.setup("coserve"), self.setup("samba")
        used = coe_bounds.uses(self.graph, self.requests)
        samba = samba or self.run("samba")
        order = [step.expert for step in samba.steps]
        slots = alone.pools[0].budget_bytes // int(self.graph.bytes_E.min())
        arrivals = self.requests[-1].arrival_s - self.requests[0].arrival_s
        experts = len(self.graph.experts)
        return {
            "distinct": self.distinct(),
            "belady_fcfs": coe_bounds.belady_fcfs(order, slots, alone.start, experts),
            "time_s": coe_bounds.time_s(setup, used, arrivals, self.machine.one_disk),
        }
