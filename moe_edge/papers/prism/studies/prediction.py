"""How well our placer's prediction tells placements apart, beside the simulator."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.bench.study import Findings
from moe_edge.core.checks import check_from_zero
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.papers.prism.studies.entry import simulated, study_of
from moe_edge.papers.prism.studies.runs import Runs, cases_of, serve
from moe_edge.papers.prism.studies.served import (
    EPLB,
    MEAN,
    OPTIMUM,
    OURS,
    PRISM,
    median_row,
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

    rules = Runs.rules | {"apart": check_from_zero}
    apart: float = 0.02


class Pair(NamedTuple):
    """Mean seconds of a request under a placement."""

    predicted_s: float
    simulated_s: float


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


def measure(settings: Prediction) -> Findings:
    """Table II's settings, there and on unequal machines."""
    points: dict[str, Seeds] = {}
    used = []
    for workload, model in TABLE_2:
        asked = {"workload": workload, "model": model}
        cases = cases_of(settings, interval_s=INTERVAL_S[workload], **asked)
        used.append(cases[0][1])
        for variant, moved in ({"": cases} | on_unequal(cases)).items():
            label = ", ".join(filter(None, (workload, model, variant)))
            points[label] = [predict_and_serve(case, seed) for seed, case in moved]
            right, count = told_apart(points[label], settings.apart)
            print(f"{label}: {right} of {count} pairs in order", flush=True)
    return findings(settings, points, used)


def findings(
    settings: Prediction, points: Mapping[str, Seeds], used: Sequence[Scenario]
) -> Findings:
    """The entry from all points."""
    rows, details, every = [], [], []
    for label, seeds in points.items():
        right, count = told_apart(seeds, settings.apart)
        over = {
            method: [s[method].predicted_s / s[method].simulated_s for s in seeds]
            for method in METHODS
        }
        every += itertools.chain.from_iterable(over.values())
        for method, ratios in over.items():
            name = f"predicted over simulated latency, {label}"
            rows.append(median_row(method, name, ratios, "1"))
        lost = over_least(seeds)
        name = f"latency of the placement predicted best over the least, {label}"
        rows.append(median_row(OURS, name, lost, "1"))
        medians = [float(np.median(ratios)) for ratios in over.values()]
        details.append(
            f"{label}: predicted over simulated {min(medians):.2f} to "
            f"{max(medians):.2f} by method; {right} of {count} pairs in order; the "
            f"placement predicted best takes {float(np.median(lost)):.3f} of the least."
        )
    right, count, near, near_count = np.sum(
        [
            told_apart(seeds, settings.apart) + told_apart(seeds, settings.apart, CLOSE)
            for seeds in points.values()
        ],
        axis=0,
    ).tolist()
    low, middle, high = np.percentile(every, (10, 50, 90))
    ours = {"predicted over simulated, percentiles 10 50 90": [low, middle, high]}
    ours |= {"pairs in order": [right, count]}
    ours |= {f"pairs in order of {', '.join(CLOSE)}": [near, near_count]}
    return simulated(
        settings,
        used,
        answer=f"Predicted over simulated latency is {middle:.2f} ({low:.2f} to "
        f"{high:.2f} for eight in ten); {right} of {count} pairs of placements are "
        f"predicted in the right order, {near} of {near_count} among the best four.",
        details=details,
        workload={"migration": "none", "methods": list(METHODS)},
        metrics=rows,
        limits=[
            "Predictions know the frequencies that routing is drawn from and the mean "
            "rates and lengths of the requests.",
            f"Pairs whose simulated latencies are less than {settings.apart:.0%} apart "
            "count as equal. The best four: " + ", ".join(CLOSE) + ".",
            "On unequal machines uniform, redundance and smartmoe overload servers: "
            "their predictions go on as a straight line, the furthest from what is "
            "simulated.",
        ],
        ours=ours,
        plot=lambda path: plot(path, points),
        summary=ours,
    )


def plot(path: Path, points: Mapping[str, Seeds]) -> None:
    """Predicted over simulated, a bar a method, a panel a setting."""
    panels = []
    for label, seeds in points.items():
        medians = {
            kind: [float(np.median([s[m][place] for s in seeds])) for m in METHODS]
            for place, kind in enumerate(Pair._fields)
        }
        panels.append(
            Panel(
                label,
                "seconds a request",
                [method.split("_")[0] for method in METHODS],
                {kind.removesuffix("_s"): values for kind, values in medians.items()},
                log=True,
            )
        )
    draw_panels(path, panels, title="Latency, predicted and simulated")


STUDY = study_of(
    name="prism_prediction",
    question="Does our placer's prediction tell which placement is faster?",
    settings=Prediction,
    measure=measure,
    source="ours, for Prism's eq. 1",
    paper={"prediction": "none"},
    why="The paper predicts no latency: its objective counts remote calls.",
)
