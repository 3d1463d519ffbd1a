"""Prism, figure 8: 4 to 256 GPUs at two rates of arrival, and 100 to 1000 Mbps."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.derived import spans
from moe_edge.bench.settings import Positive
from moe_edge.bench.study import Study
from moe_edge.hardware.clusters import PRISM_MEMORY_SHARE
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import (
    Method,
    Model,
    Runs,
    Workload,
    cases_of,
    check_has_prism,
    on_cluster,
    serve_all,
)
from moe_edge.papers.prism.studies.served import (
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
    MethodRuns,
    slower,
    stored,
)

MBPS = 500.0  # of figure 8a, as in the test bed
OURS_UP_TO = 64  # GPUs: beyond, our placer would take most of the study's time
FASTER = "a faster network is faster at every size"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure8(Runs):
    """The size of the study.

    Attributes:
      model, workload: what is asked.
      methods: what is compared, at 500 Mbps.
      gpus: of all servers together.
      intervals_s: mean seconds between requests of a server.
      mbps: rates of the lines, at the longest interval.
    """

    requests_per_server: int = 16
    model: Model = "deepseek_v2_lite"
    workload: Workload = "multidata"
    methods: Sequence[Method] = (PRISM, OPTIMUM, OURS)
    gpus: Sequence[int] = (4, 32, 256)
    intervals_s: Sequence[Positive] = (8.0, 15.0)
    mbps: Sequence[Positive] = (100.0, 200.0, 500.0, 1000.0)


def measure(settings: Figure8, rows: Rows) -> None:
    """All sizes at all rates of arrival; all line rates at the longest interval."""
    points: dict[tuple[int, float, float], MethodRuns] = {}
    first, longest_s = None, max(settings.intervals_s)
    share = PRISM_MEMORY_SHARE.get(settings.model, 1.0)
    for gpus, interval_s in itertools.product(settings.gpus, settings.intervals_s):
        options = {"num_gpus": gpus}
        cases = cases_of(settings, interval_s=interval_s, cluster_options=options)
        first = first or cases[0][1]
        rates = settings.mbps if interval_s == longest_s else ()
        for mbps in dict.fromkeys((MBPS, *rates)):
            methods = settings.methods if mbps == MBPS else (PRISM,)
            methods = [m for m in methods if m != OURS or gpus <= OURS_UP_TO]
            machines = {"mbps": mbps, "expert_memory_share": share, **options}
            moved = [(s, on_cluster(case, "prism", **machines)) for s, case in cases]
            point = gpus, interval_s, mbps
            label = f"{gpus} GPUs, {interval_s:g} s, {mbps:g} Mbps"
            served = serve_all(moved, methods, label, period_s=0.0)
            # Means of each of hundreds of servers would say nothing.
            points[point] = served.only(MEAN, LOCAL)
    tell_points(rows, settings, points)
    labels = {
        f"{g} GPUs, {i:g} s, {m:g} Mbps": one for (g, i, m), one in points.items()
    }
    rows.files |= stored(labels)
    tell(rows, settings, [first], {"migration": "none"})


def tell_points(
    rows: Rows, settings: Figure8, points: Mapping[tuple[int, float, float], MethodRuns]
) -> None:
    """Adds all points by GPUs, interval and rate, and changes from end to end."""
    for point, served in points.items():
        served.tell(rows, *point)
        for method in served.rows:
            over = served.ratio(method, PRISM)
            if method != PRISM and slower(over) > len(over) / 2:
                rows("slower", *point, method, ratio=of_seeds(over))
    fewest, most = min(settings.gpus), max(settings.gpus)
    low, high = min(settings.mbps), max(settings.mbps)
    longest_s = max(settings.intervals_s)

    def change(kind: str, at: str, old: tuple, new: tuple) -> np.ndarray:
        ratio = points[new].values(PRISM) / points[old].values(PRISM)
        rows("changes", kind, at, ratio=of_seeds(ratio))
        return ratio

    for interval_s in settings.intervals_s:
        ends = ((gpus, interval_s, MBPS) for gpus in (fewest, most))
        change(f"{fewest} to {most} GPUs", f"arrival {interval_s:g} s", *ends)
    found = []
    for gpus in settings.gpus:
        ends = ((gpus, longest_s, mbps) for mbps in (low, high))
        found.append(change(f"{low:g} to {high:g} Mbps", f"{gpus} GPUs", *ends))
    rows.checks[FASTER] = all(bool((ratio < 1).all()) for ratio in found)


def derive(tables: Tables) -> dict[str, Any]:
    """Changes by kind, and points for the pictures."""
    changes, methods = tables["changes"], tables["methods"]
    changes["change"] = changes.ratio - 1
    methods["size"] = methods.gpus.astype(str)
    longest = methods.interval_s == methods.interval_s.max()
    return {
        "spans": spans(changes, "change", "kind"),
        "change": changes,
        "sizes": methods[methods.mbps == MBPS],
        "rates": methods[longest & (methods.method == PRISM)],
        "losers": tables.get("slower", []),
    }


FRAMES = {
    "methods": frame("gpus interval_s mbps method", "mean_s local"),
    "changes": frame("kind at", "ratio"),
    "slower": frame("gpus interval_s mbps method", "ratio"),
}
STUDY = Study(
    "prism_fig8",
    Figure8,
    measure,
    FRAMES,
    derive,
    check=lambda settings: check_has_prism(settings.methods),
)
