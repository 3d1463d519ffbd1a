"""OD-MoE, table 1: recall of every predictor that we have, on one model and text."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.cases import Case, prepare
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Estimate, Rows, Tables, ranging
from moe_edge.papers.od_moe.studies.recorded import bar_checks
from moe_edge.papers.od_moe.studies.studies import Table1Settings

ANY, NEXT, PRECISION = "recall", "where_named", "precision"
RANDOM = "k random experts"
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

    def shares(self) -> dict[str, Estimate]:
        """Shares of all rounds with the range of them, by measure.

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
            shares[name] = ranging(sum(parts) / max(sum(whole), 1), rounds)
        return shares


def measure(settings: Table1Settings, rows: Rows) -> None:
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
    tell(rows, judged, moe.top_k / moe.num_experts)
    rows.checks["every case gave the resident engine's tokens"] = all(is_same)
    rows.about |= {"model": model, "workload": workload, "kind": "emulated"}
    rows.about["baselines"] = [RANDOM]


def tell(rows: Rows, judged: Mapping[str, Judged], chance: float) -> None:
    """Adds what every predictor named; `chance`: recall of k random experts."""
    for policy, one in judged.items():
        rows("recall", policy, **one.shares())
    rows("recall", RANDOM, recall=chance)


def derive(tables: Tables) -> dict[str, Any]:
    """Shadows, and which of the other predictors is right most often."""
    named = tables["recall"].set_index("policy").drop(RANDOM)
    is_shadow = named.index.str.startswith("shadow ")
    shadows = named.recall[is_shadow]
    shadows.index = shadows.index.str.removeprefix("shadow ")
    others = named.where_named[~is_shadow]
    worst = shadows.idxmin()
    beats = f"the worst shadow ({worst}) beats every other predictor"
    bars = bar_checks(shadows.to_dict())
    return {
        "shadows": shadows.rename_axis("precision").reset_index(),
        "best": others.idxmax(),
        "best_recall": others.max(),
        "shown": named.reset_index(),
        "checks": bars | {beats: bool(shadows[worst] > others.max())},
    }
