"""Suite `coserve`: many experts live at a tenth of the paper's times, beside computed.

Loads are emulated where there is no GPU. The bars: how much faster than Samba-CoE, how
many loads beside the least, how close computed time is, what deciding costs.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.bench.speed import Rows, make_row, speed_study
from moe_edge.papers.coserve.coe.case import MAX_WAIT_S
from moe_edge.papers.coserve.coe.presets import get_preset, record_bytes
from moe_edge.papers.coserve.coe.serving import ExpertServing
from moe_edge.papers.coserve.coe.setup import make_setup
from moe_edge.papers.coserve.coe.trial import with_executors
from moe_edge.papers.coserve.schedule.run_queue import ExpertJob
from moe_edge.papers.coserve.studies.entry import OURS, PAPER, SAMBA
from moe_edge.papers.coserve.studies.live import LiveSettings
from moe_edge.papers.coserve.studies.live_runs import LiveTask, run_tasks
from moe_edge.papers.coserve.workload.coe_tasks import board_graph, board_requests

NO_TIER = "samba_no_tier"
# Least gains in throughput; a row's bar is on times, so their inverse.
GAINS = {
    (PAPER, SAMBA): 3.0,
    (OURS, SAMBA): 4.5,
    (OURS, NO_TIER): 9.0,
    (OURS, PAPER): 1.15,
}
LEAST_BAR = 1.25  # switches over those that the start makes necessary
APART_BAR = 0.15  # of time and switches beside computed time, relative
SCHEDULING_BAR, MANAGEMENT_BAR = 0.03, 0.002  # of a task's time
DECISION_BAR_US = 50.0
EXECUTORS = {"gpu": 3, "cpu": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoserveSettings(LiveSettings):
    """How much suite `coserve` does.

    Attributes:
      waiting: requests that wait while decisions are timed; decisions: of each round.
    """

    waiting: int = 3500
    decisions: int = 2000


def coserve_rows(settings: CoserveSettings, work_dir: Path) -> Rows:
    """Rows of every task, then of deciding."""
    rows = []
    for task, live in run_tasks(settings, work_dir).items():
        rows += task_rows(task, live)
    return rows + decision_rows(settings)


def task_rows(task: str, live: LiveTask) -> Rows:
    """Times beside each other, loads beside the least, and beside computed time."""
    if not (live.equal and live.complete):
        raise RuntimeError(f"task {task}: a policy failed requests or judged otherwise")
    rows, more = [], {"emulated": live.kind == "emulated"}
    for (ours, peer), gain in GAINS.items():
        if not {ours, peer} <= live.runs.keys():
            continue
        ours_s, peer_s = (live.figures(name, "time_s") for name in (ours, peer))
        rounds = min(len(ours_s), len(peer_s))
        given = {"peer": peer_s[:rounds], "peer_name": peer, "bar": 1 / gain}
        case = f"{task}, {ours} beside {peer}"
        rows.append(make_row(case, ours_s[:rounds], "s", **given, **more))
    for policy in live.runs:
        rows += _beside(task, policy, live, more)
    return rows


def _beside(task: str, policy: str, live: LiveTask, more: dict) -> Rows:
    """A policy's loads and costs, and how far computed time is from it."""
    name, switches = f"{task}, {policy}", live.figures(policy, "switches")
    rows, rounds = [], len(switches)
    if policy in (PAPER, OURS):
        least = [max(live.distinct[policy], 1)] * rounds
        bar = {"bar": LEAST_BAR} if policy == OURS else {}
        given = {"peer": least, "peer_name": "least loads", **bar}
        rows.append(make_row(f"{name}, switches", switches, "1", **given, **more))
        for figure, bar in (
            ("scheduling_ratio", SCHEDULING_BAR),
            ("management_ratio", MANAGEMENT_BAR),
        ):
            values = [100 * value for value in live.figures(policy, figure)]
            case = f"{name}, {figure.removesuffix('_ratio')}"
            rows.append(make_row(case, values, "%", limit=100 * bar, **more))
    for figure in ("time_s", "switches"):
        ratios = live.over_simulated(policy, figure)
        apart = [100 * abs(ratio - 1) for ratio in ratios]
        case = f"{name}, {figure.removesuffix('_s')} apart from computed"
        rows.append(make_row(case, apart, "%", limit=100 * APART_BAR, **more))
    return rows


def decision_rows(settings: CoserveSettings) -> Rows:
    """Microseconds of an assignment or a pick with many waiting, by policy."""
    rows = []
    since_s = {"": 0.0, ", all late": MAX_WAIT_S + 1}
    for policy, when in ((PAPER, ""), (OURS, ""), (OURS, ", all late")):
        found_us = [
            decisions_us(policy, settings, since_s[when])
            for _ in range(settings.repeats)
        ]
        case = f"{policy}, {sum(EXECUTORS.values())} executors, {settings.waiting} wait"
        case += when
        for share in (50, 99):
            values = [float(np.percentile(one, share)) for one in found_us]
            name = f"decision p{share}, {case}"
            rows.append(make_row(name, values, "us", limit=DECISION_BAR_US))
    return rows


def decisions_us(
    policy: str, settings: CoserveSettings, now_s: float = 0.0
) -> Sequence[float]:
    """Of each decision, while as many wait; each batch that ends lets others come.

    Args:
      now_s: since all came: beyond the bound of waiting a lane looks at every group.
    """
    sizes = record_bytes("reduced")
    graph = board_graph(352, settings.seed, settings.decay, sizes)
    machine = with_executors(get_preset("reduced"), EXECUTORS)
    options = {"max_wait_s": MAX_WAIT_S}
    serving = ExpertServing(
        make_setup(policy, graph, machine, graph.probability_E(), options=options)
    )
    count = settings.waiting + 8 * settings.decisions
    requests = board_requests(graph, count, seed=settings.seed)
    experts = iter([graph.rules[request.component] for request in requests])
    jobs = (ExpertJob(number, expert=expert) for number, expert in enumerate(experts))
    for _ in range(settings.waiting):
        serving.come(next(jobs), 0.0)
    serving.decisions_s.clear()
    lanes = sum(EXECUTORS.values())
    while len(serving.decisions_s) < settings.decisions:
        for lane in range(lanes):
            if (batch := serving.begin(lane, now_s)) is None:
                continue
            serving.end(batch, now_s)
            for _ in batch.jobs:
                serving.come(next(jobs), now_s)
    return [1e6 * seconds for seconds in serving.decisions_s]


STUDY = speed_study(
    "coserve",
    "How fast are many experts served beside Samba-CoE, and at what cost?",
    coserve_rows,
    settings=CoserveSettings,
    limit="Networks of boards with random weights: speed only, no quality claim.",
)
