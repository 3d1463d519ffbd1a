"""The root of `moe-edge coserve`: requests for many experts, policy by policy, live on
this machine or in computed time."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_edge.core.checks import check_from_zero
from moe_edge.core.events import write_events
from moe_edge.core.files import write_json, write_text
from moe_edge.core.progress import counter
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.papers.coserve.coe.accuracy import Shares, read_accuracy, told
from moe_edge.papers.coserve.coe.case import MAX_WAIT_S, CoeWork, MachineOptions
from moe_edge.papers.coserve.coe.presets import PRESETS
from moe_edge.papers.coserve.coe.results import outputs, progress, row, run_events
from moe_edge.papers.coserve.coe.trial import TrialOptions, with_executors
from moe_edge.papers.coserve.schedule.coe_recipes import RECIPES, chosen_recipes
from moe_edge.papers.coserve.simulate.coe_case import CoeCase, make_live, used_by
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph
from moe_edge.papers.coserve.workload.coe_weights import check_weights


@root
@unpacked(work=CoeWork, options=MachineOptions, trying=TrialOptions)
def run_coserve(
    run: RunFolder,
    *,
    work: CoeWork,
    options: MachineOptions,
    trying: TrialOptions,
    policies: str = "samba,coserve,affinity",
    max_wait_s: float = MAX_WAIT_S,
    start_empty: bool = False,
    events: bool = False,
    trial: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves the same requests by every policy, and compares.

    Args:
      run: folder of `coserve.json`, `outputs_POLICY.jsonl` and, with `events`,
        `events_POLICY.jsonl`.
      work: who judges what; options: on what.
      policies: samba, samba_no_tier, samba_fifo, samba_parallel, none, em, em_ra,
        coserve, coserve_queued, affinity, separated by commas; or `all`.
      max_wait_s: under affinity nobody waits longer in a queue than that and one group,
        as far as a lane can foresee it (`Affinity`); 0: no bound. Where requests come
        faster than they are served all wait longer.
      start_empty: nothing is resident at first.
      events: write what was loaded, computed and evicted.
      trial: find the numbers of executors and of resident experts by runs of a sample
        of the requests under the first policy on all executors; `executors` are the
        most that are tried then. Policies of one executor have all memory. trying: how.
      seed: of a task's board and requests.
    Raises:
      MoeEdgeError: bad input.
    """
    check_from_zero("max_wait_s", max_wait_s)
    names = chosen_recipes(policies)
    given_profile = None if options.costs in PRESETS else options.costs
    run.check_apart(work.graph_path, work.requests_path, given_profile)
    with with_weights(work, options, seed, run.dry_run) as given:
        graph, requests = given.build(options.costs, seed)
        machine, most = options.build(graph), None
        if trial:
            most = machine.executors if options.executors else None
            machine = with_executors(machine, dict.fromkeys(machine.executors, 1))
        case = CoeCase(graph, requests, machine, start_empty, max_wait_s)
        for name in names:
            case.setup(name)
        accuracy = accuracy_of(work, graph) if options.live else None
        if work.graph is not None and (run.dry_run or not options.live):
            # A live run checks them itself, once; computed time needs no weights.
            check_weights(graph, work.graph_path.parent, absent_ok=not options.live)
        if run.dry_run:
            return {"task": work.name, "policies": names}
        kind = make_live(case, given, options) if options.live else "simulated"
        tried, alone = None, case  # of whoever has one executor: all memory
        if trial:
            shared = [name for name in names if not RECIPES[name].one_lane]
            case, tried = case.by_trial((shared or ["coserve"])[0], most, trying)
        runs, bounds = {}, {}
        for name in names:
            its = alone if RECIPES[name].one_lane else case
            with counter(f"serving by {name}"):
                runs[name] = its.run(name)
                bounds[name] = its.bounds(name, runs[name])
            print(progress(name, runs[name]), flush=True)
    answers = [found.answers for found in runs.values()]
    summary = {
        "task": work.name,
        "kind": kind,
        "policies": {name: row(found) | bounds[name] for name, found in runs.items()},
        "bounds": {"belady_fcfs": alone.belady_fcfs(runs.get("samba"))},
        "distinct_experts": len(used_by(runs[names[0]])),
        "verdicts_equal": all(one == answers[0] for one in answers),
        "accuracy": accuracy,
    }
    settings = vars(work) | vars(options) | vars(trying) | {"seed": seed}
    sources = {"source": case.machine.source, "loads": case.loads}
    stored = {"settings": settings, **sources, **summary, "trial": tried}

    def save(folder: Path) -> None:
        write_json(folder / "coserve.json", stored)
        for name, found in runs.items():
            text = "".join(
                json.dumps(line) + "\n" for line in outputs(graph, requests, found)
            )
            write_text(folder / f"outputs_{name}.jsonl", text)
            if events:
                told = run_events(found, graph.bytes_E.tolist())
                write_events(folder / f"events_{name}.jsonl", told)

    run.write(save)
    return summary


@contextlib.contextmanager
def with_weights(
    work: CoeWork, options: MachineOptions, seed: int, dry_run: bool
) -> Iterator[CoeWork]:
    """The work, with the task's board in files if it is to run live and names none."""
    if not options.live or work.graph is not None or dry_run:
        yield work
        return
    from moe_edge.papers.coserve.coe.random_board import write_board

    with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
        path = write_board(Path(folder), work.task, seed, work.decay)
        yield dataclasses.replace(work, graph=str(path))


def accuracy_of(work: CoeWork, graph: CoeGraph) -> Shares | None:
    """What those who trained the graph's experts wrote beside it."""
    if work.graph is None:
        return None
    found = read_accuracy(work.graph_path.parent, graph)
    if found is not None:
        print(told(found), flush=True)
    return found
