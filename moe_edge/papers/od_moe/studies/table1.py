"""OD-MoE, table 1: recall of every predictor that we have, on one model and text."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_edge.bench.cases import LIMITS, Case, prepare
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.study import SPREAD
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.od_moe.studies.recorded import bar_checks
from moe_edge.papers.od_moe.studies.studies import Table1Settings

ANY, NEXT, PRECISION = "recall (eq. 3)", "recall where it predicts", "precision"
AHEAD = 4  # layers, of HOBBIT's gates


def policies(precisions: Sequence[str]) -> dict[str, OffloadOptions]:
    """Every predictor over LRU."""

    def over_lru(name: str, horizon: int = 1, **options) -> OffloadOptions:
        return studied(predictor=name, predictor_options=options, horizon=horizon)

    names = ("previous", "frequency", "moe_infinity", "stale_gate")
    return {
        **{name: over_lru(name) for name in names},
        f"n_layer_gate, {AHEAD} layers": over_lru(
            "n_layer_gate", AHEAD, look_ahead=AHEAD
        ),
        "smoe_partial": over_lru("smoe_partial", top_a=None),
        **{f"shadow {p}": over_lru("shadow", precision=p) for p in precisions},
    }


@dataclasses.dataclass
class Judged:
    """What one predictor named, an entry a round: counts by layers ahead."""

    hits: list[np.ndarray] = dataclasses.field(default_factory=list)
    named: list[np.ndarray] = dataclasses.field(default_factory=list)
    chosen: list[np.ndarray] = dataclasses.field(default_factory=list)
    all_chosen: list[int] = dataclasses.field(default_factory=list)  # all layers

    def add(self, log, all_chosen: int) -> None:
        """Takes in a round's `PredictionLog`."""
        self.hits.append(log.hits_LA.sum(axis=0))
        self.named.append(log.predicted_LA.sum(axis=0))
        self.chosen.append(log.chosen_LA.sum(axis=0))
        self.all_chosen.append(all_chosen)

    def shares(self) -> dict[str, tuple[float, float]]:
        """(share, half range of rounds) by measure.

        Where several layers ahead are named, eq. 3 takes the latest prediction of a
        layer, and the recall where it predicts is that of all of them.
        """
        wholes = {
            ANY: ([hits[0] for hits in self.hits], self.all_chosen),
            NEXT: ([h.sum() for h in self.hits], [c.sum() for c in self.chosen]),
            PRECISION: ([h.sum() for h in self.hits], [n.sum() for n in self.named]),
        }
        shares = {}
        for name, (parts, whole) in wholes.items():
            rounds = [p / w for p, w in zip(parts, whole, strict=True) if w]
            value = sum(parts) / max(sum(whole), 1)
            shares[name] = float(value), float(np.ptp(rounds or [0])) / 2
        return shares


def run(settings: Table1Settings) -> Findings:
    """Runs the layered engine with every predictor over the same prompts."""
    options = policies(settings.precisions)
    cases = [
        Case(policy, settings.device_memory, 1, one) for policy, one in options.items()
    ]
    judged = {policy: Judged() for policy in options}
    is_same = []
    with Bench(settings.checkpoint) as bench:
        ready = prepare(bench, cases, settings)
        per_step = len(bench.config.moe_layers) * bench.config.moe.top_k
        for prompts in ready.rounds:
            expected = generate(bench.resident, prompts, settings.new_tokens)
            for case, engine in zip(cases, ready.engines, strict=True):
                engine.reset_records()
                done = generate(engine, prompts, settings.new_tokens)
                log = engine.predictor_run.accuracy
                judged[case.policy].add(log, done.steps * per_step)
                is_same.append(done.tokens == expected.tokens)
        workload, model, moe = ready.workload(settings), bench.model, bench.config.moe
    chance = moe.top_k / moe.num_experts
    return findings(judged, model, workload, chance, all(is_same), settings)


def findings(judged, model, workload, chance, is_same, settings) -> Findings:
    """The entry; `chance`: recall of k random experts."""
    shares = {policy: one.shares() for policy, one in judged.items()}
    rows = [
        metric(policy, name, value, "1", settings.rounds, (SPREAD, width))
        for policy, found in shares.items()
        for name, (value, width) in found.items()
    ]
    rows.append(metric("k random experts", ANY, chance, "1"))
    recalls = {policy: found[ANY][0] for policy, found in shares.items()}
    shadows = {p: recalls[f"shadow {p}"] for p in settings.precisions}
    others = {
        policy: found[NEXT][0]
        for policy, found in shares.items()
        if not policy.startswith("shadow")
    }
    best = max(others, key=others.get)
    worst = min(shadows, key=shadows.get)
    named = ", ".join(f"{p} {value:.4f}" for p, value in shadows.items())
    return Findings(
        answer=f"Shadows {named}; of the others {best} is right most often, "
        f"{others[best]:.3f} of the layers that it predicts.",
        model=model,
        workload=workload,
        metrics=rows,
        limits=[
            LIMITS[0],
            "SMoE's partial state depends on which experts are absent, and so on the "
            "budget and the emulated link; the others do not.",
            "Past sequences that frequency and moe_infinity learn from are few.",
            LIMITS[2],
        ],
        kind="emulated",
        checks={
            "every case gave the resident engine's tokens": is_same,
            **bar_checks(shadows),
            f"the worst shadow ({worst}) beats every other predictor": shadows[worst]
            > others[best],
        },
        ours=recalls | {f"{p}, where it predicts": v for p, v in others.items()},
        plot=lambda path: plot(path, shares, chance),
        baselines=["k random experts"],
        summary={"recall": recalls},
    )


def plot(path, shares, chance: float) -> None:
    """Bars of every predictor, a group a measure."""
    names = (ANY, NEXT, PRECISION)
    series, spreads = (
        {p: [found[name][i] for name in names] for p, found in shares.items()}
        for i in range(2)
    )
    level = "k random experts", chance
    panel = Panel("", "share", names, series, spreads, level=level)
    draw_panels(path, [panel], title="What predictors name, decode steps")
