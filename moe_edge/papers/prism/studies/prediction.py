"""How well our placer's prediction tells placements apart, beside the simulator."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_edge.bench.derived import spans
from moe_edge.bench.settings import FromZero
from moe_edge.bench.study import Study
from moe_edge.metrics.frames import Rows, Tables, frame, of_seeds
from moe_edge.papers.prism.studies.entry import tell
from moe_edge.papers.prism.studies.runs import Runs, cases_of, serve
from moe_edge.papers.prism.studies.served import (
    EPLB,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
)
from moe_edge.papers.prism.studies.table2 import (
    INTERVAL_S,
    METHODS,
    TABLE_2,
    on_unequal,
)
from moe_edge.place.latency_model import LatencyModel
from moe_edge.place.placer import get_placer
from moe_edge.simulate.cluster.scenario import Scenario

CLOSE = (EPLB, PRISM, OPTIMUM, OURS)  # the others are far behind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(Runs):
    """The size of the study.

    Attributes:
      apart: placements whose simulated latencies differ by less, as a share, count as
        equal.
    """

    apart: FromZero = 0.02


class Pair(NamedTuple):
    """Mean seconds of a request under a placement."""

    predicted_s: float
    simulated_s: float


Point = tuple[str, str, str]  # workload, model, variant
Seeds = Sequence[Mapping[str, Pair]]  # by seed and method


def predict_and_serve(case: Scenario, seed: int) -> dict[str, Pair]:
    """Every method's placement, which stays as it is."""
    problem = case.problem(seed)
    model = LatencyModel.of(problem)
    found = {}
    for method in METHODS:
        placement = get_placer(method).solve(problem)
        served_s = serve(case, method, seed, period_s=0.0).row()[MEAN]
        found[method] = Pair(model.seconds(placement.on_NLE), served_s)
    return found


def told_apart(
    seeds: Seeds, apart: float, methods: Sequence[str] | None = None
) -> tuple[int, int]:
    """(right, all) pairs of placements that the prediction orders as the simulator.

    Args:
      apart: least difference of simulated latencies, as a share.
      methods: whose placements; None: all.
    """
    right = count = 0
    for by_method in seeds:
        found = [by_method[name] for name in methods or by_method]
        for one, other in itertools.combinations(found, 2):
            if abs(one.simulated_s / other.simulated_s - 1) < apart:
                continue
            count += 1
            faster = one.simulated_s < other.simulated_s
            right += faster == (one.predicted_s < other.predicted_s)
    return right, count


def over_least(seeds: Seeds) -> list[float]:
    """By seed: latency of the placement predicted best, over the least one."""
    found = []
    for by_method in seeds:
        chosen = min(by_method.values(), key=lambda pair: pair.predicted_s)
        least_s = min(pair.simulated_s for pair in by_method.values())
        found.append(chosen.simulated_s / least_s)
    return found


def measure(settings: Prediction, rows: Rows) -> None:
    """Table II's settings, there and on unequal machines."""
    points: dict[Point, Seeds] = {}
    used = []
    for workload, model in TABLE_2:
        asked = {"workload": workload, "model": model}
        cases = cases_of(settings, interval_s=INTERVAL_S[workload], **asked)
        used.append(cases[0][1])
        for variant, moved in ({"": cases} | on_unequal(cases)).items():
            point = workload, model, variant
            points[point] = [predict_and_serve(case, seed) for seed, case in moved]
            right, count = told_apart(points[point], settings.apart)
            label = ", ".join(filter(None, point))
            print(f"{label}: {right} of {count} pairs in order", flush=True)
    tell_points(rows, points, settings.apart)
    tell(rows, settings, used, {"migration": "none", "methods": list(METHODS)})


def tell_points(rows: Rows, points: Mapping[Point, Seeds], apart: float) -> None:
    """Adds every point, and how all predictions together did."""
    every: list[float] = []
    for point, seeds in points.items():
        for method in METHODS:
            over = [s[method].predicted_s / s[method].simulated_s for s in seeds]
            every += over
            rows("methods", *point, method, over=of_seeds(over))
        right, count = told_apart(seeds, apart)
        lost = of_seeds(over_least(seeds))
        rows("points", *point, over_least=lost, right=right, pairs=count)
    for among, methods in (("all", None), ("the best four", CLOSE)):
        found = [told_apart(seeds, apart, methods) for seeds in points.values()]
        right, count = np.sum(found, axis=0)
        rows("pairs", among, right=right, pairs=count)
    for percent in (10, 50, 90):
        rows("percentiles", percent, over=np.percentile(every, percent))


def derive(tables: Tables) -> dict[str, Any]:
    """Percentiles by name, and of every point its span over methods."""
    percentiles = tables["percentiles"].set_index("percent").over
    found = spans(tables["methods"], "over", "workload model variant")
    return {
        "over": {f"p{percent}": value for percent, value in percentiles.items()},
        "each": found.merge(tables["points"]),
    }


FRAMES = {
    "methods": frame("workload model variant method", "over"),
    "points": frame("workload model variant", "over_least right pairs"),
    "pairs": frame("among", "right pairs"),
    "percentiles": frame("percent", "over"),
}
STUDY = Study("prism_prediction", Prediction, measure, FRAMES, derive)
