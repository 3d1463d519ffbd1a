"""How skew, memory and the number of copies change who places best."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_edge.bench.derived import spans
from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import (
    Model,
    Runs,
    Workload,
    cases_of,
    on_cluster,
    serve_all,
)
from moe_edge.papers.prism.studies.served import (
    EPLB,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
    frames_at,
    losses,
    stored,
)
from moe_edge.simulate.cluster.scenario import Scenario

BASE_SHARE = {"prism": 0.3, "mixed": 0.6}  # 1.7 copies of DeepSeek-V2-Lite on both
METHODS = (EPLB, PRISM, OPTIMUM, OURS)
PAIRS = (
    *((OURS, EPLB), (OURS, PRISM), (OURS, OPTIMUM)),
    *((OPTIMUM, EPLB), (OPTIMUM, PRISM), (PRISM, EPLB)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity(Runs):
    """The size of the study.

    Attributes:
      model, workload, interval_s: what is asked, how often at each server.
      skews: factors on what sets the domains apart.
      memory_shares: of a GPU's memory, for experts, on the mixed cluster.
      gpus: of all servers together.
    """

    requests_per_server: int = 40
    model: Model = "deepseek_v2_lite"
    workload: Workload = "bigbench"
    interval_s: Positive = 10.0
    skews: Sequence[Positive] = (0.5, 1.0, 2.0)
    memory_shares: Sequence[Positive] = (0.4, 0.5, 0.6, 0.8)
    gpus: Sequence[int] = (4, 16)


def copies(case: Scenario) -> float:
    """How many copies of the model's experts the cluster has room for."""
    slots = case.cost_model.cluster.slots(case.shape.block.num_bytes)
    return float(sum(one.sum() for one in slots)) / case.shape.num_blocks


def measure(settings: Sensitivity, rows: Rows) -> None:
    """Every skew, memory and number of servers; static placements."""
    files: dict[str, MethodRuns] = {}
    base = None

    def add(study: str, cluster: str, value: str | None, cases, share=None) -> None:
        if share is not None:
            options = {"expert_memory_share": share}
            cases = [(s, on_cluster(case, cluster, **options)) for s, case in cases]
        point = study, cluster, value or f"{copies(cases[0][1]):.2f}"
        served = serve_all(cases, METHODS, " ".join(point), period_s=0.0)
        served.tell(rows, *point, pairs=PAIRS)
        files[" ".join(point)] = served

    for skew in settings.skews:
        cases = cases_of(settings, skew=skew)
        base = cases if base is None or skew == 1.0 else base
        for name, share in BASE_SHARE.items():
            add("skew", name, f"{skew:g}", cases, share)
    for name, share in BASE_SHARE.items():
        for relative in settings.memory_shares:
            # Shares are of the base: both clusters hold alike.
            alike = round(share * relative / BASE_SHARE["mixed"], 6)
            add("memory", name, None, base, alike)
    for gpus in settings.gpus:
        cases = cases_of(settings, cluster_options={"num_gpus": gpus})
        add("copies", "prism", f"{copies(cases[0][1]):.1f}", cases)
    rows.files |= stored(files)
    more = {"base_memory_share": BASE_SHARE, "migration": "none"}
    tell(rows, settings, [base[0][1]], more, [EPLB, PRISM])


def derive(tables: Tables) -> dict[str, Any]:
    """Changes of mean latency, from the first to the last value of what is varied."""
    over, methods = tables["over"], tables["methods"]
    over["change"] = over.ratio - 1
    mine = over[over.method == OURS]
    ends = over.groupby(["study", "cluster", "method", "over"], sort=False).agg(
        first_value=("value", "first"),
        last_value=("value", "last"),
        first=("change", "first"),
        last=("change", "last"),
    )
    optimum = methods[(methods.study == "memory") & (methods.method == OPTIMUM)]
    faster = []
    for _, some in optimum.groupby("cluster", sort=False):
        by_memory = some.set_index(some.value.astype(float)).mean_s.sort_index()
        faster.append(by_memory.iloc[-1] <= by_memory.iloc[0])
    more = "more memory is never slower than least, for the optimum"
    return {
        "spans": spans(mine, "change", "over"),
        "ends": ends.reset_index(),
        "to_eplb": over[over.over == EPLB],
        "lost": losses(over, "study", "value", "cluster"),
        "checks": {more: all(map(bool, faster))},
    }


STUDY = Study(
    name="prism_sensitivity",
    settings=Sensitivity,
    frames=frames_at("study cluster value", servers=False),
    measure=measure,
    derive=derive,
)
