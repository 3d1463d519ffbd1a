"""Figure 19 of CoServe, live: what scheduling costs beside inference."""

from typing import Any

from moe_edge.bench.rounds import round_order
from moe_edge.metrics.frames import Rows, Tables, median
from moe_edge.papers.coserve.coe.results import CoeRun
from moe_edge.papers.coserve.schedule.recorded import Prescheduled, Recording
from moe_edge.papers.coserve.studies.live import Scheduling
from moe_edge.papers.coserve.studies.live_entry import board_folder, tell
from moe_edge.papers.coserve.studies.live_runs import LiveTask, begin


def measure_scheduling(settings: Scheduling, rows: Rows) -> None:
    """Runs as usual, and runs whose decisions were made in advance, in turn."""
    tasks = {}
    for task in settings.tasks:
        with board_folder(settings) as root:
            live = tasks[task] = begin(settings, task, root)
            found = _scheduled_rounds(live, settings)
        live.runs = {" ".join(name).strip(): runs for name, runs in found.items()}
        for policy in settings.policies:
            usual, ahead = found[policy, ""], found[policy, "ahead"]
            rounds = zip(usual[::2], ahead, usual[1::2], strict=True)
            gap = [
                (before.time_s + after.time_s) / 2 / between.time_s - 1
                for before, between, after in rounds
            ]
            rows(
                "runs",
                *(task, policy),
                gap=median(gap),
                scheduling_ms=median([_scheduling_ms(run) for run in usual]),
                inference_ms=median([_inference_ms(run) for run in usual]),
                ahead_ms=median([_inference_ms(run) for run in ahead]),
                management=median([run.management_s / run.time_s for run in usual]),
            )
    tell(rows, settings, tasks)


def derive_scheduling(tables: Tables) -> dict[str, Any]:
    """What scheduling takes beside inference, at most."""
    runs = tables["runs"]
    return {"share": (runs.scheduling_ms / runs.inference_ms).max()}


def _scheduled_rounds(
    live: LiveTask, settings: Scheduling
) -> dict[tuple[str, str], list[CoeRun]]:
    """(policy, "" or "ahead") -> two runs or one a round."""
    found = {(policy, how): [] for policy in settings.policies for how in ("", "ahead")}
    for policy in settings.policies:
        live.case.run(policy)  # what is slower the first time
    for number in range(settings.repeats):
        for policy in round_order(list(settings.policies), number):
            # What is repeated are the decisions of the run just before: another one's
            # differ by more than deciding costs. One more run follows, so that
            # neither way is always the later one.
            usual, repeated = live.case.setup(policy), live.case.setup(policy)
            usual.policy = recording = Recording(usual.policy)
            found[policy, ""].append(live.case.serve(usual))
            repeated.policy = Prescheduled(
                *(repeated.costs, repeated.pools, live.case.graph.follow),
                plan=recording.plan,
            )
            found[policy, "ahead"].append(live.case.serve(repeated))
            found[policy, ""].append(live.case.run(policy))
            times = [run.time_s for run in found[policy, ""][-2:]]
            ahead_s = found[policy, "ahead"][-1].time_s
            print(f"{policy}: {times} s, ahead {ahead_s:.4g} s", flush=True)
    return found


def _scheduling_ms(run: CoeRun) -> float:
    return 1e3 * sum(run.decisions_s) / len(run.latency_s)


def _inference_ms(run: CoeRun) -> float:
    """Computing, with what goes with it, without loads."""
    busy_s = sum(step.end_s - step.begin_s - step.load_s for step in run.steps)
    return 1e3 * busy_s / len(run.latency_s)
