"""Prism, table I, live: serving alone against serving together, on real processes."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.hardware.cluster_calibration import ClusterCalibration
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import Findings
from moe_edge.place.policy import ALONE as ALONE_METHODS
from moe_edge.studies.prism import live_seeds
from moe_edge.studies.prism.live_entry import (
    NOT_COMPARABLE,
    live_findings,
    same_tokens,
)
from moe_edge.studies.prism.live_seeds import LiveMethods, LiveSeed, each_seed
from moe_edge.studies.prism.served import LOCAL, Served, median_row, stored
from moe_edge.studies.prism.table1 import (
    ALONE,
    TABLE_1,
    beside,
    changes_of,
    metrics_of,
    panels_of,
)
from moe_edge.studies.study import Claim, Study

TOGETHER = "uniform"
MS = 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table1Live(LiveMethods):
    """`LiveMethods` names the rest.

    Attributes:
      host_bytes_per_s: of each server's emulated link to its host memory.
    """

    methods: Sequence[str] = (*ALONE_METHODS, TOGETHER)
    host_bytes_per_s: float = 75e6


def check(settings: Table1Live) -> None:
    """Refuses a cluster that cannot be, or a comparison without both sides."""
    if not {ALONE, TOGETHER} <= set(settings.methods):
        raise ConfigError(
            f"methods is {tuple(settings.methods)}, expected {ALONE!r} and "
            f"{TOGETHER!r} among them"
        )
    live_seeds.check(settings)


def layer_ms(run: LiveSeed) -> float:
    """A decoded token's layer with all its experts at home: the run's servers' mean."""
    costs = ClusterCalibration.load(run.folder).servers
    one = [server.buckets[0] for server in costs]
    blocks = run.facts["top_k"]
    return MS * float(
        np.mean([each.dense_s + blocks * (each.block_s + each.pair_s) for each in one])
    )


def measure(settings: Table1Live) -> Findings:
    """Runs every seed; the answer."""
    rows, facts, layers_ms = {method: [] for method in settings.methods}, [], []
    with settings.folder() as folder:
        for run in each_seed(settings, folder):
            facts.append(run.facts)
            layers_ms.append(layer_ms(run))
            for method in settings.methods:
                rows[method].append(run.facts["rows"][method])
    return findings(settings, Served(rows), facts, layers_ms)


def findings(
    settings: Table1Live,
    served: Served,
    facts: Sequence[Mapping],
    layers_ms: Sequence[float],
) -> Findings:
    """The entry of some runs."""
    ours, changes = served.cells(), changes_of(served)
    load_ms = MS * facts[0]["block_bytes"] / settings.host_bytes_per_s
    loads = load_ms / float(np.median(layers_ms))
    local = [
        median_row(method, "local ratio", served.values(method, LOCAL), "1")
        for method in settings.methods
    ]
    found_ms = median_row("all", "computation of a layer at home", layers_ms, "ms")
    return live_findings(
        settings,
        facts,
        answer=f"Mean latency against {ALONE}, live: {beside(changes)}.",
        details=[
            f"A block takes {load_ms:.2f} ms from host memory: {loads:.1f} times what "
            "a layer of a decoded token computes at home, as the calibration of these "
            "runs has it.",
            *(_line(method, served) for method in settings.methods),
        ],
        metrics=[*metrics_of(served), *local, found_ms],
        limits=[
            "The ratio of host link and network decides who wins; the paper names "
            "neither its host link's rate nor its software's time.",
            "Few requests; spreads are over seeds of requests, arrivals and random "
            "placements.",
        ],
        baselines=[ALONE],
        checks=same_tokens(facts) | as_in_the_paper(ours),
        ours=ours,
        plot=lambda path: draw_panels(
            path, panels_of("live", ours), title="Serving alone and together"
        ),
        files=stored({"table I": served}),
        summary={"change": changes, "load_over_layer": loads},
    )


def _line(method: str, served: Served) -> str:
    """What a method's servers did."""
    if method not in ALONE_METHODS:
        share, calls = served.median(method, LOCAL), "remote_calls"
        return (
            f"{method}: {100 * share:.0f} % of pairs at home, "
            f"{served.median(method, calls):.0f} remote calls."
        )
    moved_mb = served.median(method, "host_bytes") / 1e6
    hits = served.median(method, "hit_ratio")
    return (
        f"{method}: {100 * hits:.0f} % of blocks found in their slots, "
        f"{moved_mb:.0f} MB from host memory, "
        f"{served.median(method, 'redirected'):.0f} requests passed on."
    )


def as_in_the_paper(ours: Mapping[str, Sequence[float]]) -> dict[str, bool]:
    """Order of the means, and of every server who is faster, alone or together."""
    known = [method for method in TABLE_1 if method in ours]
    orders = [sorted(known, key=lambda m: rows[m][-1]) for rows in (TABLE_1, ours)]
    signs = [
        [a > b for a, b in zip(rows[ALONE], rows[TOGETHER], strict=True)]
        for rows in (TABLE_1, ours)
    ]
    found = {"target: means in the paper's order": orders[0] == orders[1]}
    places = [*(f"server {n + 1}" for n in range(len(signs[0]) - 1)), "all servers"]
    for place, theirs, mine in zip(places, *signs, strict=True):
        name = f"target: {'together' if theirs else 'alone'} is faster on {place}"
        found[name] = theirs == mine
    return found


STUDY = Study(
    name="prism_table1_live",
    question="Does sharing experts beat serving alone on three live servers (Prism, "
    "table I)?",
    settings=Table1Live,
    measure=measure,
    check=check,
    claim=Claim(
        source="Prism, table I; seconds on servers 1, 2, 3 and over all",
        paper=TABLE_1,
        why="The paper names no rate of its host link (A100s, so PCIe 4: about 400 "
        "times its 500 Mbit/s) and loads blocks of 350 MB. Ours are 74 kB, which any "
        "such link brings at once. So the link is emulated at a rate at which one load "
        "lasts about twice a layer's computation, which the entry states; a faster one "
        "favours serving alone.",
        not_comparable=NOT_COMPARABLE,
    ),
)
